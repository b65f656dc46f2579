"""Properties of requests: whatever a body contains, the response is complete, no error of the server, and the next
request succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.serving.running_server import serving
from tests.serving.test_openai_requests import HELLO

VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "stream": True, "logit_bias": {"1": 2}}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": ["x"], "stop_token_ids": [4], "temperature": 0.5}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "top_k": 3, "seed": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/generate", {"prompt": {"prompt_token_ids": [1, 2]}, "n": 2, "logprobs": 0, "prompt_logprobs": 1}),
    ("/generate", {"input_ids": [1], "sampling_params": {"n": 2, "max_new_tokens": 3}, "return_logprob": True}),
    ("/generate", {"text": "a", "rid": "r", "return_text_in_logprobs": True, "top_logprobs_num": 1}),
    ("/v1/generate", {"prompts": ["a", [1]], "n": 2, "max_tokens": 3, "top_p": 0.5, "min_p": 0.1}),
]
NAMES = sorted({name for _, fields in VALID for name in fields} | {
    "model", "best_of", "presence_penalty", "echo", "stream_options", "max_completion_tokens", "repetition_penalty",
    "return_token_ids", "ignore_eos", "tools", "response_format", "user", "unknown", "role", "content", "type", "1",
})  # fmt: skip

numbers = st.sampled_from([0, 1, -1, 2, 65, 96, 97, 2**31, 2**63, 2**64, -(2**63), 0.0, 0.5, 1e-38, 1e-6, 1e300, 1.5])
texts = st.text(max_size=8) | st.sampled_from(["", "a", "\x00", "\ud800", "\U0001f600", "<end>", "policy", "x" * 3000])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | texts, inner, max_size=3),
    max_leaves=8,
)
LITERALS = [b"NaN", b"1e999", b"9" * 5000, b'"\xff"', b'"\\ud800"', b"[" * 3000 + b"]" * 3000, b"}", b"\x00", b'"a":1,']


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and a body: a valid request with up to three changes, to fields at any depth or to the bytes."""
    route, fields = draw(st.sampled_from(VALID))
    fields = json.loads(json.dumps(fields))
    for _ in range(draw(st.integers(0, 3))):
        target: Any = fields
        while isinstance(target, dict | list) and target and draw(st.booleans()):
            inner = [one for one in (target.values() if isinstance(target, dict) else target) if one]
            nested = [one for one in inner if isinstance(one, dict | list)]
            if not nested:
                break
            target = draw(st.sampled_from(nested))
        if isinstance(target, dict):
            target[draw(st.sampled_from(NAMES) | texts)] = draw(values)
        elif target and draw(st.booleans()):
            target[draw(st.integers(0, len(target) - 1))] = draw(values)
        else:
            target.extend(draw(st.lists(values, max_size=3)))
    body = json.dumps(fields).encode()
    if draw(st.integers(0, 3)) == 0:
        begin = draw(st.integers(0, len(body)))
        end = draw(st.integers(begin, min(len(body), begin + 8)))
        body = body[:begin] + draw(st.sampled_from(LITERALS) | st.binary(max_size=4)) + body[end:]
    return route, body


Post = Callable[[str, bytes], httpx.Response]


@pytest.fixture(scope="module")
def post() -> Iterator[Post]:
    """Send requests to one server with a fake engine."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving()) as served:

        async def send(route: str, body: bytes) -> httpx.Response:
            return await served.http.post(route, content=body)

        yield lambda route, body: portal.call(send, route, body)


@pytest.mark.parametrize("profile", ["repeatable", pytest.param("many", marks=pytest.mark.slow)])
def test_no_body_is_an_error_of_the_server_and_the_next_request_succeeds(post: Post, profile: str) -> None:
    """The status is 200, or 4xx with an error object. The event log has no exception."""

    @settings.get_profile(profile)
    @given(request=requests())
    def check(request: tuple[str, bytes]) -> None:
        answer = post(*request)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        elif "event-stream" in answer.headers["content-type"]:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        assert post("/v1/completions", b'{"prompt": "good", "max_tokens": 1}').status_code == 200

    with capture_logs() as logged:
        check()
    assert [entry for entry in logged if "exc_info" in entry] == []
