"""Malformed requests: each is refused by the name of its field, and the next good request is answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from protocols.errors import RequestError
from tests.fakes import CharacterTokenizer
from tests.serving.serving import CONTEXT, Served, serving

VOCABULARY = CharacterTokenizer.vocab_size
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {"prompt": ""}, "empty"),
    ("prompt", {"prompt": []}, "empty"),
    ("prompt", {"prompt": [""]}, "empty"),
    ("prompt", {"prompt": [[]]}, "empty"),
    ("prompt", {"prompt": None}, "prompt"),
    ("prompt", {"prompt": {"prompt_token_ids": [1]}}, "prompt"),
    ("prompt", {"prompt": [-1]}, ">= 0"),
    ("prompt", {"prompt": [10**9]}, f"ends at {VOCABULARY - 1}"),
    ("prompt", {"prompt": [2**70]}, "vocabulary"),
    ("prompt", {"prompt": [1.5]}, "float"),
    ("prompt", {"prompt": [1, "a"]}, "mixes"),
    ("prompt", {"prompt": [[1], 2]}, "mixes"),
    ("prompt", {"prompt": [["a"]]}, "str"),
    ("prompt", {"prompt": "x" * CONTEXT}, f"{CONTEXT} tokens leave no room in the context of {CONTEXT}"),
    ("prompt", {"prompt": ["x"] * 100}, "limit of 64"),
    ("stop", {"stop": 5}, "int"),
    ("stop", {"stop": ["x"] * 10_000}, "<= 16"),
    ("stop", {"stop": ["x" * 10_000]}, "<= 256"),
    ("stop", {"stop": [5]}, "int"),
    ("seed", {"seed": 2**70}, str(2**63 - 1)),
    ("seed", {"seed": -1}, ">= 0"),
    ("seed", {"seed": "x"}, "str"),
    ("logit_bias", {"logit_bias": {str(VOCABULARY): 5}}, f"ends at {VOCABULARY - 1}"),
    ("logit_bias", {"logit_bias": {"99999999": 5}}, "vocabulary"),
    ("logit_bias", {"logit_bias": {"-1": 5}}, ">= 0"),
    ("logit_bias", {"logit_bias": {"a": 5}}, "int"),
    ("logit_bias", {"logit_bias": {"1": 101}}, "<= 100"),
    ("logit_bias", {"logit_bias": [1, 2]}, "array"),
    ("stop_token_ids", {"stop_token_ids": [VOCABULARY]}, "vocabulary"),
    ("top_k", {"top_k": -1}, ">= 0"),
    ("top_k", {"top_k": 1.5}, "float"),
    ("top_p", {"top_p": 1.01}, "<= 1.0"),
    ("top_p", {"top_p": 0}, "> 0.0"),
    ("min_p", {"min_p": -0.1}, ">= 0.0"),
    ("repetition_penalty", {"repetition_penalty": 0}, "> 0.0"),
    ("temperature", {"temperature": -1}, ">= 0.0"),
    ("temperature", {"temperature": 101}, "<= 100.0"),
    ("temperature", {"temperature": "hot"}, "str"),
    ("temperature", {"temperature": True}, "bool"),
    ("max_tokens", {"max_tokens": 0}, ">= 1"),
    ("max_tokens", {"max_tokens": -1}, ">= 1"),
    ("max_tokens", {"max_tokens": 10**12}, f"context's {CONTEXT}"),
    ("max_tokens", {"max_tokens": 1.5}, "float"),
    ("max_tokens", {"max_tokens": CONTEXT}, "the prompt has 4"),
    ("n", {"n": 0}, ">= 1"),
    ("n", {"n": 10**6}, "limit of 64"),
    ("n", {"n": True}, "bool"),
    ("logprobs", {"logprobs": 21}, "<= 20"),
    ("logprobs", {"logprobs": True}, "bool"),
    ("stream", {"stream": "yes"}, "str"),
    ("stream_options", {"stream_options": {"include_usage": True}}, "needs stream"),
    ("stream_options", {"stream": True, "stream_options": {"usage": True}}, "usage"),
    ("return_token_ids", {"return_token_ids": 1}, "int"),
    ("adapters", {"adapters": "/etc"}, "unknown field"),
    ("echo", {"echo": True}, "not supported"),
    ("best_of", {"best_of": 4}, "not supported"),
    ("suffix", {"suffix": "end"}, "not supported"),
    ("presence_penalty", {"presence_penalty": 0.5}, "not supported"),
    ("frequency_penalty", {"frequency_penalty": -1}, "not supported"),
    ("min_tokens", {"min_tokens": 3}, "not supported"),
    ("prompt_logprobs", {"prompt_logprobs": 0}, "not supported"),
]

BAD_CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"messages": []}, ">= 1"),
    ("messages", {"messages": None}, "array"),
    ("messages", {"messages": [{"role": "user", "content": 123}]}, "int"),
    ("messages", {"messages": [{"role": "user"}]}, "content"),
    ("messages", {"messages": [{"role": "pirate", "content": "a"}]}, "pirate"),
    ("messages", {"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}, "tool_calls"),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}
            ]
        },
        "not supported",
    ),
    ("messages", {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "no room"),
    ("tools", {"tools": [{"type": "function"}]}, "not supported"),
    ("tool_choice", {"tool_choice": "required"}, "not supported"),
    ("response_format", {"response_format": {"type": "json_object"}}, "not supported"),
    ("top_logprobs", {"top_logprobs": 2}, "needs logprobs"),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}, "<= 20"),
    ("logprobs", {"logprobs": 3}, "int"),
    ("max_completion_tokens", {"max_completion_tokens": 0}, ">= 1"),
    ("max_tokens", {"max_completion_tokens": 3, "max_tokens": 4}, "differs"),
    ("continue_final_message", {"continue_final_message": True}, "not supported"),
    ("chat_template", {"chat_template": "{{ 1 }}"}, "not supported"),
]

BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"{", "JSON"),
    (b'{"prompt": "a"} x', "JSON"),
    (b"\xff\xfe", "JSON"),
    (b'{"prompt": "\xff"}', "JSON"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "JSON"),
    (b'{"prompt": "a", "temperature": Infinity}', "JSON"),
    (b'{"prompt": "a", "logit_bias": {"1": -Infinity}}', "JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "JSON"),
    (b'{"prompt": "a", "seed": ' + b"1" * 5000 + b"}", "JSON"),
    (b"[" * 100_000, "deep"),
    (b'{"prompt": ' * 100_000, "deep"),
    (b'["prompt"]', "object"),
    (b'"prompt"', "object"),
    (b"null", "object"),
    (b'{"prompt": "a", "prompt": "b"}', "twice"),
    (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "twice"),
    (b"{}", "prompt"),
]


def refused(answer: httpx.Response, param: str | None, text: str) -> None:
    """Check the status and the whole shape of the error."""
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert param is None or error["param"] == param
    assert len(error["message"]) < 500


async def still_alive(served: Served) -> None:
    """The next good request is answered, and nothing of the bad ones is left."""
    assert (await served.post(TEXT, prompt="good", max_tokens=2)).status_code == 200
    await served.engine.until(lambda: served.engine.running == 0)
    assert len(served.engine.asked) == 1


async def test_bad_fields_of_completions_are_refused_by_name() -> None:
    """Wrong type, out of range, unknown, unsupported: 400 that names the field and what is allowed."""
    async with serving() as served:
        for param, fields, text in BAD_FIELDS:
            refused(await served.post(TEXT, **({"model": "policy", "prompt": "good"} | fields)), param, text)
        await still_alive(served)


async def test_bad_fields_of_chats_are_refused_by_name() -> None:
    """The same for chats; an image address is never opened."""
    async with serving() as served:
        for param, fields, text in BAD_CHATS:
            refused(await served.post(CHAT, **({"model": "policy", "messages": HELLO} | fields)), param, text)
        await still_alive(served)


@pytest.mark.parametrize("route", [TEXT, CHAT])
async def test_bodies_that_are_not_strict_json_are_refused(route: str) -> None:
    """Truncated, not UTF-8, not finite, too deep, not an object, named twice."""
    async with serving() as served:
        for body, text in BAD_BODIES:
            wanted = text if route == TEXT or text != "prompt" else "messages"
            refused(await served.http.post(route, content=body), None, wanted)
        await still_alive(served)


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    """Clients send defaults and nulls; what changes nothing is no error."""
    nothing = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "tools": [], "tool_choice": "none", "top_p": None,
        "response_format": {"type": "text"}, "presence_penalty": 0, "frequency_penalty": 0.0, "stop": None,
        "seed": None, "logit_bias": None, "stream": False, "stream_options": None, "top_k": 0,
        "parallel_tool_calls": True, "reasoning": {"enabled": True, "effort": "high"},
    }  # fmt: skip
    async with serving() as served:
        assert (await served.post(CHAT, messages=HELLO, **nothing)).status_code == 200


async def test_text_parts_are_joined_and_developers_are_systems() -> None:
    """Content in parts means its text; `developer` is the newer name of `system`."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serving() as served:
        await served.post(
            CHAT, messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}], max_tokens=1
        )
        plain = [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]
        assert served.engine.asked[0].prompt == CharacterTokenizer().render_chat(plain)


@pytest.mark.parametrize("name", ["other", "../../etc", "/etc", "http://x", "~", "a\x00b", "x" * 1_000_000, ""])
async def test_unknown_models_are_not_found(name: str) -> None:
    """404 that names the field and repeats at most 200 characters."""
    async with serving() as served:
        answer = await served.post(TEXT, model=name, prompt="x")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert len(error["message"]) < 300


async def test_a_template_that_refuses_the_conversation_is_a_400() -> None:
    """What the chat template raises is told to the client."""
    async with serving() as served:

        def picky(*_: object, **__: object) -> tuple[int, ...]:
            raise ValueError("conversation roles must alternate")

        served.engine.tokenizer.render_chat = picky  # type: ignore[method-assign]
        refused(await served.post(CHAT, messages=HELLO), "messages", "must alternate")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_400_also_for_a_stream(stream: bool) -> None:
    """A stream that cannot begin is an error, not an empty stream."""
    async with serving() as served:
        served.engine.refusal = RequestError("the cache is too small for this", param="max_tokens")
        refused(await served.post(TEXT, prompt="x", stream=stream), "max_tokens", "cache is too small")


async def test_errors_outside_the_routes_have_the_same_shape() -> None:
    """404 and 405 are JSON too."""
    async with serving() as served:
        for method, path, status in (("GET", "/nowhere", 404), ("GET", TEXT, 405), ("DELETE", "/health", 405)):
            answer = await served.http.request(method, path)
            assert answer.status_code == status
            assert json.loads(answer.content)["error"]["type"] == "invalid_request_error"
