"""The OpenAPI document of the HTTP API, generated from the structs of requests and responses.

The routes of the dashboard are not part of it: the page is their only client, and they change with it
(docs/dashboard-internals.md).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from attachments.adapters.routes_adapters import (
    AdapterStatus,
    LoadAdapter,
    LoadByPath,
    LoadedByPath,
    UnloadAdapter,
    UnloadByName,
)
from attachments.dialects.control import PauseMode
from attachments.dialects.responses_format import ResponseObject
from attachments.dialects.responses_requests import CreateResponse
from attachments.dialects.routes_control import (
    AbortRequest,
    AbortRequests,
    ControlStatus,
    Paused,
    PauseGeneration,
    Sleeping,
)
from attachments.dialects.routes_generate import SglangRequest, SglangResponse, VllmRequest, VllmResponse
from attachments.dialects.routes_tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeRequest,
    TokenizeResponse,
)
from attachments.dialects.routes_tokens import TokensRequest, TokensResponse
from attachments.dialects.routes_trl import TrlRequest, TrlResponse
from attachments.remote.messages import RolloutAnswer, RolloutCall, ServedPolicy
from clotho import __version__
from clotho.serving.completion_requests import CompletionRequest
from clotho.serving.errors import ErrorBody
from clotho.serving.openai_fields import ChatRequest
from clotho.serving.openai_responses import ChatChoice, CompletionChoice, ModelCard, ModelList, ResponseBody
from clotho.serving.services import Health, Version


class ChatResponse(ResponseBody, frozen=True, kw_only=True):
    """The body of a response of /v1/chat/completions, or of one streamed chunk."""

    choices: Sequence[ChatChoice]


class CompletionResponse(ResponseBody, frozen=True, kw_only=True):
    """The body of a response of /v1/completions, or of one streamed chunk."""

    choices: Sequence[CompletionChoice]


REF = "#/components/schemas/{name}"
JSON, TEXT, EVENTS, BYTES = "application/json", "text/plain", "text/event-stream", "application/octet-stream"


class Operation(NamedTuple):
    """One method of one path.

    requests, responses: structs of the body, each one alternative; without responses, the response is text. streams:
    the response can be a stream of server-sent events. query: name of each query parameter -> its JSON schema. binary:
    the body of the request is bytes. access: which clients it is for; see `ACCESS`.
    """

    method: str
    summary: str
    requests: tuple[type, ...] = ()
    responses: tuple[type, ...] = ()
    streams: bool = False
    query: dict[str, Any] = {}  # noqa: RUF012, never changed
    binary: bool = False
    access: Literal["all", "own", "admin"] = "all"


ACCESS = {
    "own": "Concerns what belongs to the API key of the request; for an administrator, what belongs to any client.",
    "admin": "For administrators: API keys with `admin = true`, `server.api_key`, and every client of a server "
    "without keys. Others receive status 403.",
}
"""Descriptions of operations that are not the same for all clients."""

MODE = {"type": "string", "enum": [*get_args(PauseMode)], "default": "abort"}
PAUSE = {"mode": MODE, "clear_cache": {"type": "boolean", "default": True}}
LEVEL = {"mode": MODE, "level": {"type": "integer", "enum": [0, 1], "default": 1}}

OPERATIONS: dict[str, Operation] = {
    "/v1/chat/completions": Operation("post", "Complete a conversation", (ChatRequest,), (ChatResponse,), streams=True),
    "/v1/responses": Operation(
        "post", "Answer the items of a conversation", (CreateResponse,), (ResponseObject,), streams=True
    ),
    "/v1/completions": Operation("post", "Complete prompts", (CompletionRequest,), (CompletionResponse,), streams=True),
    "/generate": Operation(
        "post",
        "Sample completions of one prompt (vLLM, SGLang)",
        (VllmRequest, SglangRequest),
        (VllmResponse, SglangResponse),
    ),
    "/v1/generate": Operation("post", "Sample completions of many prompts (TRL)", (TrlRequest,), (TrlResponse,)),
    "/inference/v1/generate": Operation(
        "post", "Token IDs in, token IDs and log-probabilities out", (TokensRequest,), (TokensResponse,)
    ),
    "/tokenize": Operation(
        "post", "Convert text or a conversation to tokens", (TokenizeRequest, TokenizeChatRequest), (TokenizeResponse,)
    ),
    "/detokenize": Operation("post", "Convert tokens to text", (DetokenizeRequest,), (DetokenizeResponse,)),
    "/pause": Operation(
        "post", "Pause the decode engine (vLLM)", responses=(ControlStatus,), query=PAUSE, access="admin"
    ),
    "/resume": Operation("post", "Continue (vLLM)", responses=(ControlStatus,), access="admin"),
    "/is_paused": Operation("get", "Whether the engine is paused (vLLM)", responses=(Paused,)),
    "/sleep": Operation(
        "post", "Pause and free caches (vLLM)", responses=(ControlStatus,), query=LEVEL, access="admin"
    ),
    "/wake_up": Operation("post", "Continue after sleep (vLLM)", responses=(ControlStatus,), access="admin"),
    "/is_sleeping": Operation("get", "Whether the engine sleeps (vLLM)", responses=(Sleeping,)),
    "/abort_requests": Operation("post", "Abort requests (vLLM)", (AbortRequests,), (ControlStatus,), access="own"),
    "/abort_request": Operation("post", "Abort a request (SGLang)", (AbortRequest,), (ControlStatus,), access="own"),
    "/pause_generation": Operation("post", "Pause (SGLang)", (PauseGeneration,), (ControlStatus,), access="admin"),
    "/continue_generation": Operation("post", "Continue (SGLang)", responses=(ControlStatus,), access="admin"),
    "/flush_cache": Operation("post", "Empty the prefix cache (SGLang)", responses=(ControlStatus,), access="admin"),
    "/v1/load_lora_adapter": Operation("post", "Load an adapter (vLLM)", (LoadAdapter,), access="own"),
    "/v1/unload_lora_adapter": Operation("post", "Unload an adapter (vLLM)", (UnloadAdapter,), access="own"),
    "/lora/load": Operation("post", "Load an adapter (Atropos)", (LoadByPath,), (LoadedByPath,), access="own"),
    "/lora/unload": Operation("post", "Unload an adapter (Atropos)", (UnloadByName,), (AdapterStatus,), access="own"),
    "/lora/status": Operation("get", "The loaded adapters (Atropos)", responses=(AdapterStatus,)),
    "/v1/rollouts": Operation("post", "Sample a group of a training run", (RolloutCall,), (RolloutAnswer,)),
    "/v1/policy": Operation(
        "get", "The policy that a training run of another process sends", responses=(ServedPolicy,)
    ),
    "/v1/policy/weights": Operation(
        "put", "Replace the weights of the policy", responses=(ServedPolicy,), binary=True, access="admin"
    ),
    "/v1/models": Operation("get", "List the models that requests can name", responses=(ModelList,)),
    "/v1/models/{name}": Operation("get", "One model by its name", responses=(ModelCard,)),
    "/health": Operation("get", "State of the server; status 503 unless it is ok or paused", responses=(Health,)),
    "/version": Operation("get", "Version of Clotho", responses=(Version,)),
    "/metrics": Operation("get", "Metrics in the text format of Prometheus"),
}
"""Every operation of the API, by path. A path with a trailing slash is not listed twice."""


@cache
def document() -> bytes:
    """Return the document as JSON."""
    types = {kind for one in OPERATIONS.values() for kind in (*one.requests, *one.responses)} | {ErrorBody}
    ordered = sorted(types, key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Clotho", "version": __version__, "description": "HTTP API of a Clotho server."},
            "paths": {path: {one.method: _operation(path, one)} for path, one in OPERATIONS.items()},
            "components": {
                "schemas": {name: _with_description(schema) for name, schema in components.items()},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def _operation(path: str, one: Operation) -> dict[str, Any]:
    content = (
        {JSON: {"schema": _alternatives(one.responses)}} if one.responses else {TEXT: {"schema": {"type": "string"}}}
    )
    if one.streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "operationId": re.sub("[{}]", "", path).strip("/").replace("/", "_").replace(".", "_"),
        "summary": one.summary,
        **({"description": ACCESS[one.access]} if one.access in ACCESS else {}),
        "parameters": [
            *({"name": name, "in": "query", "required": False, "schema": schema} for name, schema in one.query.items()),
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"\{(\w+)\}", path)
            ),
        ],
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {"description": "Error", "content": {JSON: {"schema": _reference(ErrorBody)}}},
        },
    }
    if one.binary:
        found["requestBody"] = {"required": True, "content": {BYTES: {"schema": {"type": "string"}}}}
    if one.requests:
        found["requestBody"] = {"required": True, "content": {JSON: {"schema": _alternatives(one.requests)}}}
    return found


def _alternatives(kinds: tuple[type, ...]) -> dict[str, Any]:
    return _reference(kinds[0]) if len(kinds) == 1 else {"anyOf": [_reference(kind) for kind in kinds]}


def _reference(kind: type) -> dict[str, Any]:
    return {"$ref": REF.format(name=kind.__name__)}


def _with_description(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose description is plain text."""
    text = schema.get("description")
    return schema | {"description": inspect.cleandoc(text)} if isinstance(text, str) else schema
