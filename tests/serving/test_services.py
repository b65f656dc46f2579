"""Every endpoint records completions under the label of the client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from msgspec import structs
from starlette.requests import Request

from attachments.atropos.sample_log import SampleLog
from clotho.serving.auth import client_of
from clotho.serving.services import Recording
from protocols.sampling import Completion, SampleRequest
from tests.fakes import CharacterTokenizer
from tests.serving.running_server import Served, server_context, serving

IDS = [1, 2, 3]
KEYS: dict[str, Any] = {"max_tokens": 5, "n": 2, "ignore_eos": True, "seed": 3}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [IDS, [4]], **KEYS}),
    "completions stream": ("/v1/completions", {"prompt": [IDS, [4]], "stream": True, **KEYS}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **KEYS}),
    "chat stream": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True, **KEYS}),
    "vllm": ("/generate", {"prompt": {"prompt_token_ids": IDS}, **KEYS}),
    "sglang": ("/generate", {"input_ids": IDS, "sampling_params": KEYS}),
    "trl": ("/v1/generate/", {"prompts": ["a", "b"], **KEYS}),
}
BEARER = {"authorization": "Bearer x:guessing"}


class RecordedCompletions:
    """A sample recorder that keeps every call."""

    def __init__(self) -> None:
        self.taken: list[tuple[SampleRequest, Completion, str]] = []
        self.log = SampleLog()

    async def begin(self, http: Request, _: Sequence[SampleRequest], /) -> Recording:
        """Record under the label of the client."""
        return Recording(remember=partial(self.remember, client_label=client_of(http.scope).label))

    def remember(self, request: SampleRequest, completion: Completion, /, *, client_label: str) -> None:
        """Keep the call and update the sample log."""
        self.taken.append((request, completion, client_label))
        self.log.remember(request, completion, client_label=client_label)


@asynccontextmanager
async def recording_server(
    monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[Served, RecordedCompletions]]:
    """Serve with a sample recorder and `record_supports`."""
    recorder = RecordedCompletions()

    def with_recorder(served: Served, **keys: Any) -> Any:
        recorded = {"sample_log": recorder, "record_supports": True, "record_routes": True}
        return structs.replace(server_context(served, **keys), **recorded)

    monkeypatch.setattr("tests.serving.running_server.server_context", with_recorder)
    async with serving(**settings) as served:
        yield served, recorder


@pytest.mark.parametrize("name", ROUTES)
async def test_every_endpoint_records_each_completion_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The sample log finds the completion by its tokens."""
    route, body = ROUTES[name]
    async with recording_server(monkeypatch) as (served, recorder):
        answer = await served.http.post(route, json=body, headers=BEARER)
        assert answer.status_code == 200
        prompts = len(served.engine.requests)
        assert len(recorder.taken) == 2 * prompts
        assert {client_label for _, _, client_label in recorder.taken} == {"guessing"}
        assert len({(request.prompt, completion.tokens) for request, completion, _ in recorder.taken}) == 2 * prompts
        for request, completion, _ in recorder.taken:
            assert request.record_routes
            tokens = [*request.prompt, *completion.tokens]
            found = recorder.log.find(tokens, len(request.prompt), len(tokens))
            assert found
            assert found.logprobs.tolist() == pytest.approx(completion.logprobs)
            assert found.client_label == "guessing"


async def test_a_completion_is_recorded_before_the_client_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment may send its group as soon as it has received the last event."""
    async with recording_server(monkeypatch) as (served, recorder):
        body = {"prompt": IDS, "stream": True, **KEYS}
        async with served.http.stream("POST", "/v1/completions", json=body, headers=BEARER) as answer:
            ended = 0
            async for line in answer.aiter_lines():
                ended += '"finish_reason":"length"' in line
                assert len(recorder.taken) >= ended
        assert ended == 2


async def test_a_failed_completion_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has received an error."""
    async with recording_server(monkeypatch) as (served, recorder):
        served.engine.allow(3)
        body = {"prompt": IDS, "stream": True, **KEYS}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            served.engine.submit_call(lambda: served.engine.fail("the tick raised"))
            await answer.aread()
        assert recorder.taken == []


@pytest.mark.parametrize(
    ("key", "sent", "client_label"),
    [
        ("", None, ""), ("", "Bearer x", ""), ("", "Bearer x:", ""), ("", "Bearer :one", "one"),
        ("", "Bearer a:b:guessing_game-2", "guessing_game-2"), ("", "Bearer x:" + "y" * 32, "y" * 32),
        ("", "Bearer x:" + "y" * 33, ""), ("", "Bearer x:a b", ""), ("", "Bearer x:a/b", ""),
        ("", "Basic x:guessing", ""),
        ("secret", "Bearer secret:one", "one"), ("a:b", "Bearer a:b", ""), ("a:b", "Bearer a:b:one", "one"),
    ],
)  # fmt: skip
async def test_the_label_follows_the_api_key_or_the_last_colon(
    monkeypatch: pytest.MonkeyPatch, key: str, sent: str | None, client_label: str
) -> None:
    """At most 32 letters, digits, `-` and `_`. A colon in the key of the server does not start a label."""
    async with recording_server(monkeypatch, api_key=key) as (served, recorder):
        headers = {} if sent is None else {"authorization": sent}
        assert (await served.http.post("/generate", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert [taken[2] for taken in recorder.taken] == [client_label]


@pytest.mark.parametrize(
    ("fields", "recorded"),
    [
        ({}, False), ({"top_k": 20}, True), ({"top_k": 20, "top_p": 0.9}, True), ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False), ({"top_k": CharacterTokenizer.vocab_size}, False),
    ],
)  # fmt: skip
async def test_supports_are_recorded_if_top_k_limits_them(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], recorded: bool
) -> None:
    """A top_k of the vocabulary size keeps all tokens."""
    async with recording_server(monkeypatch) as (served, _):
        assert (await served.post("/generate", prompt="x", max_tokens=2, **fields)).status_code == 200
        assert served.engine.requests[0].record_support == recorded
