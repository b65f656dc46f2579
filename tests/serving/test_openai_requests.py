"""Invalid requests to the OpenAI endpoints are rejected, and the server continues to serve."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from clotho.serving import answering
from protocols.errors import RequestError
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import CONTEXT, Served, serving

VOCABULARY = CharacterTokenizer.vocab_size
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def _each(fields: dict[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, {name: value}) for name, values in fields.items() for value in values)


BAD_FIELDS: list[tuple[str, dict[str, Any]]] = [
    *_each({
        "prompt": ["", [], [""], [[]], None, {"prompt_token_ids": [1]}, [-1], [10**9], [2**70], [1.5], [1, "a"],
            [[1], 2], [["a"]], "x" * CONTEXT, ["x"] * 100],
        "stop": [5, ["x"] * 10_000, ["x" * 10_000], [5]],
        "seed": [2**70, -2, "x"],
        "logit_bias": [{str(VOCABULARY): 5}, {"99999999": 5}, {"-1": 5}, {"a": 5}, {"1": 101}, [1, 2],
            {str(token): True for token in range(3)}, {str(token): 0 for token in range(1025)}],
        "stop_token_ids": [[VOCABULARY], [1] * 129],
        "top_k": [-1, 1.5],
        "top_p": [1.01, 0],
        "min_p": [-0.1],
        "repetition_penalty": [0, 1e-38],
        "temperature": [1e-38, 9e-6, -1, 101, "hot", True],
        "max_tokens": [0, -1, 10**12, 1.5, CONTEXT],
        "n": [0, 10**6, True],
        "logprobs": [21, True],
        "stream": ["yes"],
        "stream_options": [{"include_usage": True}],
        "return_token_ids": [1],
        "adapters": ["/etc"],
        "best_of": [4, True],
        "echo": [0],
        "presence_penalty": [False, 2.5],
        "frequency_penalty": [False, -3],
        "min_tokens": [False, -1],
        "suffix": ["end"],
        "allowed_token_ids": [[VOCABULARY], "a"],
        "bad_words": [[""], ["x" * 100], "x"],
    }),
    ("stream_options", {"stream": True, "stream_options": {"usage": True}}),
    ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
]  # fmt: skip

BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    *_each({
        "messages": [[], None, [{"role": "user", "content": 123}], [{"role": "user"}], HELLO * 2049,
            [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}],
            [{"role": "pirate", "content": "a"}], [{"role": "assistant", "content": "a", "tool_calls": []}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}],
            [{"role": "user", "content": "x" * CONTEXT}],
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
            [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
            [{"role": "user", "content": "a", "tool_call_id": "1"}]],
        "tools": [[{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}],
            [{"type": "function", "function": {"name": "a"}}] * 2],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
        "response_format": [{"type": "json_schema"}, {"type": "xml"}, {"type": "text", "schema": {}}],
        "structured_outputs": [{}, {"regex": "a", "choice": ["a"]}],
        "guided_choice": [[]],
        "reasoning_effort": ["much"],
        "top_logprobs": [2],
        "logprobs": [3],
        "max_completion_tokens": [0],
        "continue_final_message": [True],
        "chat_template": ["{{ 1 }}"],
    }),
    ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
    ("guided_regex", {"guided_json": {}, "guided_regex": "a"}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("max_tokens", {"max_completion_tokens": 3, "max_tokens": 4}),
]  # fmt: skip

BAD_BODIES: list[bytes] = [
    b"", b"{", b'{"prompt": "a"} x', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "logit_bias": {"1": -Infinity}}', b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", b"[" * 100_000, b'{"prompt": ' * 100_000, b'["prompt"]',
    b'"prompt"', b"null", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', b"{}",
]  # fmt: skip


def assert_rejected(answer: httpx.Response, param: str | None) -> None:
    """Check the status and every field of the error."""
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert "\n" not in error["message"]
    assert len(error["message"]) < 500


async def assert_still_serving(served: Served) -> None:
    """Check that a valid request succeeds and that no invalid request reached the engine."""
    assert (await served.post(TEXT, prompt="good", max_tokens=2)).status_code == 200
    await served.engine.wait_until(lambda: served.engine.running == 0)
    assert len(served.engine.requests) == 1


async def test_an_invalid_completion_request_is_rejected_with_the_name_of_the_field() -> None:
    """Wrong type, out of range, unknown, unsupported."""
    async with serving() as served:
        for param, fields in BAD_FIELDS:
            assert_rejected(await served.post(TEXT, **({"model": "policy", "prompt": "good"} | fields)), param)
        await assert_still_serving(served)


async def test_an_invalid_chat_request_is_rejected_with_the_name_of_the_field() -> None:
    """The server never opens the URL of an image."""
    async with serving() as served:
        for param, fields in BAD_CHATS:
            assert_rejected(await served.post(CHAT, **({"model": "policy", "messages": HELLO} | fields)), param)
        await assert_still_serving(served)


@pytest.mark.parametrize("route", [TEXT, CHAT])
async def test_a_body_that_is_not_a_strict_json_object_is_rejected(route: str) -> None:
    """Truncated, not UTF-8, not finite, nested too deeply, not an object, duplicate field, missing field."""
    async with serving() as served:
        for body in BAD_BODIES:
            assert_rejected(await served.http.post(route, content=body), None)
        await assert_still_serving(served)


async def test_values_without_effect_are_accepted() -> None:
    """Clients send defaults and nulls."""
    nothing = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none", "top_p": None,
        "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": None,
        "seed": None, "logit_bias": None, "stream": False, "stream_options": None, "top_k": 0,
        "parallel_tool_calls": True, "reasoning": {"enabled": True, "effort": "high"},
    }  # fmt: skip
    async with serving() as served:
        assert (await served.post(CHAT, messages=HELLO, **nothing)).status_code == 200


async def test_hints_of_clients_that_serve_many_models_are_accepted_without_effect() -> None:
    """A reasoning effort for a model without reasoning, and names of caches and priorities."""
    hints = {
        "verbosity": "low", "cache_salt": "a", "priority": 3,
        "prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"},
    }  # fmt: skip
    async with serving() as served:
        texts = [
            (await served.post(CHAT, messages=HELLO, seed=1, max_tokens=8, **fields)).json()["choices"][0]["message"]
            for fields in (hints, {})
        ]
        assert texts[0] == texts[1]
        assert (await served.post(CHAT, messages=HELLO, reasoning_effort="high")).status_code == 200


async def test_a_seed_of_minus_one_is_random() -> None:
    """As in vLLM and llama.cpp."""
    async with serving() as served:
        for _ in range(2):
            await served.post(TEXT, prompt="good", seed=-1, max_tokens=2)
        first, second = (request.seeds for request in served.engine.requests)
        assert first != second


async def test_text_parts_are_joined_and_developer_messages_are_system_messages() -> None:
    """`developer` is OpenAI's newer name of the role `system`."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serving() as served:
        await served.post(
            CHAT, messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}], max_tokens=1
        )
        plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
        assert served.engine.requests[0].prompt == CharacterTokenizer().render_chat(plain)


@pytest.mark.parametrize("name", ["other", "../../etc", "/etc", "http://x", "~", "\x9b2J\u202e", "x" * 1_000_000, ""])
async def test_an_unknown_model_is_a_404(name: str) -> None:
    """The error contains the field and at most 200 characters of the name, without control characters."""
    async with serving() as served:
        answer = await served.post(TEXT, model=name, prompt="x")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert len(error["message"]) < 300
        assert error["message"].isprintable()


async def test_an_exception_of_the_chat_template_is_a_400() -> None:
    """The client receives the message of the exception."""
    async with serving() as served:

        def strict_template(*_: object, **__: object) -> tuple[int, ...]:
            raise ValueError("conversation roles must alternate")

        served.engine.tokenizer.render_chat = strict_template  # type: ignore[method-assign]
        answer = await served.post(CHAT, messages=HELLO)
        assert_rejected(answer, "messages")
        assert "must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_rejects_is_a_400_also_for_a_stream(stream: bool) -> None:
    """A stream that cannot start is an error response, not an empty stream."""
    async with serving() as served:
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        assert_rejected(await served.post(TEXT, prompt="x", stream=stream), "max_tokens")


TEXT_REQUESTS: dict[str, Any] = {
    "prompt": (TEXT, lambda text: {"prompt": text}),
    "messages": (CHAT, lambda text: {"messages": [{"role": "user", "content": text}]}),
    "text": ("/generate", lambda text: {"text": text}),
    "prompts": ("/v1/generate", lambda text: {"prompts": [text]}),
}


def refuse_to_tokenize(*_: object, **__: object) -> tuple[int, ...]:
    """Stand for a tokenizer that must not be called."""
    raise AssertionError("the text was tokenized")


@pytest.mark.parametrize("param", TEXT_REQUESTS)
async def test_a_text_that_cannot_fit_the_context_is_refused_before_tokenization(param: str) -> None:
    """Its bytes are compared with the context length times the longest token."""
    route, fields = TEXT_REQUESTS[param]
    longest = CONTEXT * CharacterTokenizer.longest_token_bytes
    async with serving() as served:
        tokenizer = served.engine.tokenizer
        tokenizer.encode = tokenizer.render_chat = refuse_to_tokenize  # type: ignore[method-assign]
        assert_rejected(await served.post(route, **fields("7" * 4_000_000)), param)
        assert_rejected(await served.post(route, **fields("é" * (longest // 2) + "x")), param)


@pytest.mark.parametrize(
    ("route", "param", "fields"),
    [
        (TEXT, "prompt", {"prompt": ["a"] * 100_000}),
        (TEXT, "prompt", {"prompt": ["a"] * 33, "n": 2}),
        (CHAT, "n", {"messages": HELLO, "n": 65}),
        ("/generate", "n", {"text": "a", "sampling_params": {"n": 65}}),
        ("/generate", "n", {"prompt": "a", "n": 65}),
        ("/v1/generate/", "prompts", {"prompts": ["a"] * 100_000}),
    ],
)
async def test_completions_are_counted_before_tokenization(route: str, param: str, fields: dict[str, Any]) -> None:
    """The number of prompts times n."""
    async with serving() as served:
        tokenizer = served.engine.tokenizer
        tokenizer.encode = tokenizer.render_chat = refuse_to_tokenize  # type: ignore[method-assign]
        assert_rejected(await served.post(route, **fields), param)


async def test_a_long_tokenization_does_not_delay_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies have a thread of their own. A second large body gets status 503 when its wait runs out."""
    monkeypatch.setattr(answering, "TOKENIZE_SECONDS", 0.5)
    gate, large = threading.Event(), {"user": "u" * answering.LARGE_BODY_BYTES}
    async with serving() as served:
        encode, answers = served.engine.tokenizer.encode, []

        def slow(text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
            if text == "slow":
                gate.wait()
            return encode(text, add_special_tokens=add_special_tokens)

        served.engine.tokenizer.encode = slow  # type: ignore[method-assign]

        async def post(prompt: str) -> None:
            answers.append(await served.post(TEXT, prompt=prompt, **large))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, "slow")
            tasks.start_soon(post, "slow")
            assert (await served.post(TEXT, prompt="good")).status_code == 200
        gate.set()
        busy, late = sorted(answers, key=lambda answer: -answer.status_code)
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
        assert_rejected(late, None)
        with anyio.fail_after(10):
            while (await served.post(TEXT, prompt="good", **large)).status_code == 503:
                await anyio.lowlevel.checkpoint()


async def test_an_endless_chat_template_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is rejected, and its thread is free for the next request."""
    monkeypatch.setattr(answering, "TOKENIZE_SECONDS", 0.5)
    monkeypatch.setattr(answering, "TOKENIZER_THREADS", 1)
    async with serving() as served:
        render = served.engine.tokenizer.render_chat

        def endless(*_: object, **__: object) -> tuple[int, ...]:
            while True:
                pass

        served.engine.tokenizer.render_chat = endless  # type: ignore[method-assign]
        assert_rejected(await served.post(CHAT, messages=HELLO), None)
        served.engine.tokenizer.render_chat = render  # type: ignore[method-assign]
        assert (await served.post(CHAT, messages=HELLO)).status_code == 200


async def test_errors_of_unknown_paths_and_methods_have_the_same_format() -> None:
    """404 and 405 responses are JSON."""
    async with serving() as served:
        for method, path, status in (("GET", "/nowhere", 404), ("GET", TEXT, 405), ("DELETE", "/health", 405)):
            answer = await served.http.request(method, path)
            assert answer.status_code == status
            assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"


async def test_the_error_of_an_unknown_path_names_a_similar_one_and_the_list() -> None:
    """A client without `/v1` in its base URL learns the path; every client learns where the endpoints are listed."""
    async with serving() as served:
        near = (await served.post("/chat/completions", messages=HELLO)).json()["error"]["message"]
        far = (await served.http.get("/" + "x" * 300)).json()["error"]["message"]
        assert "/v1/chat/completions" in near
        assert "/v1/" not in far
        assert "GET /openapi.json" in near
        assert "GET /openapi.json" in far
