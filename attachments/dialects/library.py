"""What `dialects` adds to the library: routes of OpenAI, Anthropic, SGLang, vLLM and TRL, and control of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clotho.serving.parts import Endpoint, ServerParts
    from clotho.serving.services import EngineAccess

HERE = "attachments.dialects"
ANTHROPIC = {"errors": f"{HERE}.messages_format:MessagesError"}
SAMPLING: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "/v1/responses": ("responses", "Answer the items of a conversation",
     "responses_requests:CreateResponse", "responses_format:ResponseObject", {"streams": True}),
    "/v1/messages": ("messages", "Answer a conversation (Anthropic)",
     "messages_requests:CreateMessage", "messages_format:MessageObject", {**ANTHROPIC, "streams": True}),
    "/v1/messages/count_tokens": ("count_tokens", "Count the tokens of a conversation (Anthropic)",
     "messages_requests:CountTokens", "messages_requests:TokenCount", ANTHROPIC),
    "/generate": ("generate", "Sample completions of one prompt (vLLM, SGLang)",
     "routes_generate:VllmRequest routes_generate:SglangRequest",
     "routes_generate:VllmResponse routes_generate:SglangResponse", {}),
    "/v1/generate": ("generate_many", "Sample completions of many prompts (TRL)",
     "routes_generate:TrlRequest", "routes_generate:TrlResponse", {"also": ("/v1/generate/",)}),
    "/inference/v1/generate": ("generate_tokens", "Token IDs in, token IDs and log-probabilities out",
     "routes_tokens:TokensRequest", "routes_tokens:TokensResponse", {}),
    "/tokenize": ("tokenize", "Convert text or a conversation to tokens",
     "routes_tokenize:TokenizeRequest routes_tokenize:TokenizeChatRequest", "routes_tokenize:TokenizeResponse", {}),
    "/detokenize": ("detokenize", "Convert tokens to text",
     "routes_tokenize:DetokenizeRequest", "routes_tokenize:DetokenizeResponse", {}),
}  # fmt: skip
"""POST routes by path: method of `DialectRoutes`, what it does, bodies of requests and of responses, and options."""


def server(parts: ServerParts) -> None:
    """Add the routes of vLLM, SGLang and TRL, and the control of the engine."""
    parts.endpoints += _sampling_endpoints(parts)
    if (access := parts.offered.engine) is not None:
        parts.endpoints += _control_endpoints(parts, access)


def _sampling_endpoints(parts: ServerParts) -> Iterator[Endpoint]:
    """Return the routes that sample or tokenize."""
    from clotho.serving.parts import Endpoint, Handlers

    routes = Handlers(f"{HERE}.endpoints:DialectRoutes", parts)

    for path, (method, about, requests, responses, more) in SAMPLING.items():
        kinds, answers = (tuple(f"{HERE}.{name}" for name in names.split()) for names in (requests, responses))
        yield Endpoint("POST", path, routes.method(method), about, kinds, answers, **more)
    info = f"{HERE}.routes_tokenize:TokenizerInfo"
    yield Endpoint(
        "GET", "/tokenizer_info", routes.method("tokenizer_info"), "Describe the tokenizer", responses=(info,)
    )


def _control_endpoints(parts: ServerParts, access: EngineAccess) -> Iterator[Endpoint]:
    """Return the routes that control the engine. Requests that are paused do not keep them from being admitted."""
    from clotho.serving.parts import Endpoint, Handlers

    place = f"{HERE}.routes_control"
    routes = Handlers(f"{place}:ControlHandlers", parts, access)
    mode = {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"}
    pause = {"mode": mode, "clear_cache": {"type": "boolean", "default": True}}
    level = {"mode": mode, "level": {"type": "integer", "enum": [0, 1], "default": 1}}

    def get(path: str, method: str, about: str, response: str) -> Endpoint:
        return Endpoint("GET", path, routes.method(method), about, responses=(f"{place}:{response}",))

    def post(path: str, method: str, about: str, *requests: str, **more: Any) -> Endpoint:
        kinds, status = tuple(f"{place}:{request}" for request in requests), (f"{place}:ControlStatus",)
        return Endpoint("POST", path, routes.method(method), about, kinds, status, admitted=False, **more)

    def admin(path: str, method: str, about: str, *requests: str, **more: Any) -> Endpoint:
        return post(path, method, about, *requests, access="admin", **more)

    yield admin("/pause", "pause", "Pause the decode engine (vLLM)", query=pause)
    yield admin("/resume", "resume", "Continue (vLLM)")
    yield get("/is_paused", "is_paused", "Whether the engine is paused (vLLM)", "Paused")
    yield admin("/sleep", "sleep", "Pause and free caches (vLLM)", query=level)
    yield admin("/wake_up", "wake_up", "Continue after sleep (vLLM)")
    yield get("/is_sleeping", "is_sleeping", "Whether the engine sleeps (vLLM)", "Sleeping")
    yield post("/abort_requests", "abort_requests", "Abort requests (vLLM)", "AbortRequests", access="own")
    yield post("/abort_request", "abort_request", "Abort a request (SGLang)", "AbortRequest", access="own")
    yield admin("/pause_generation", "pause_generation", "Pause (SGLang)", "PauseGeneration")
    yield admin("/continue_generation", "resume", "Continue (SGLang)")
    yield admin("/flush_cache", "flush_cache", "Empty the prefix cache (SGLang)")
