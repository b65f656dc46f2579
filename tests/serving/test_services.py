"""What is sampled for a client is remembered, under the label it gave, on every route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from clotho.inference.sample_log import SampleLog
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


class Notes:
    """Everything that was to be remembered."""

    def __init__(self) -> None:
        self.taken: list[tuple[SampleRequest, Completion, str]] = []
        self.log = SampleLog()

    def remember(self, request: SampleRequest, completion: Completion, /, *, client_label: str) -> None:
        """Note it, and keep it as a run would."""
        self.taken.append((request, completion, client_label))
        self.log.remember(request, completion, client_label=client_label)


@asynccontextmanager
async def remembering(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[tuple[Served, Notes]]:
    """Serve with somebody who remembers, and supports recorded."""
    notes = Notes()

    def with_notes(served: Served, **keys: Any) -> Any:
        return structs.replace(server_context(served, **keys), sample_log=notes, record_supports=True)

    monkeypatch.setattr("tests.serving.running_server.server_context", with_notes)
    async with serving(**settings) as served:
        yield served, notes


@pytest.mark.parametrize("name", ROUTES)
async def test_every_route_remembers_each_completion_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With the request that it belongs to; what the log then finds is what was sampled."""
    route, body = ROUTES[name]
    async with remembering(monkeypatch) as (served, notes):
        answer = await served.http.post(route, json=body, headers=BEARER)
        assert answer.status_code == 200
        prompts = len(served.engine.asked)
        assert len(notes.taken) == 2 * prompts
        assert {client_label for _, _, client_label in notes.taken} == {"guessing"}
        assert len({(request.prompt, completion.tokens) for request, completion, _ in notes.taken}) == 2 * prompts
        for request, completion, _ in notes.taken:
            tokens = [*request.prompt, *completion.tokens]
            found = notes.log.find(tokens, len(request.prompt), len(tokens))
            assert found
            assert found.logprobs.tolist() == pytest.approx(completion.logprobs)
            assert found.client_label == "guessing"


async def test_it_is_remembered_before_the_client_can_know_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the event with the reason has come, an environment may already have sent its group off."""
    async with remembering(monkeypatch) as (served, notes):
        body = {"prompt": IDS, "stream": True, **KEYS}
        async with served.http.stream("POST", "/v1/completions", json=body, headers=BEARER) as answer:
            ended = 0
            async for line in answer.aiter_lines():
                ended += '"finish_reason":"length"' in line
                assert len(notes.taken) >= ended
        assert ended == 2


async def test_what_a_client_did_not_get_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed generation leaves nothing."""
    async with remembering(monkeypatch) as (served, notes):
        served.engine.allow(3)
        body = {"prompt": IDS, "stream": True, **KEYS}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            served.engine.submit_call(lambda: served.engine.fail("the tick raised"))
            await answer.aread()
        assert notes.taken == []


@pytest.mark.parametrize(
    ("sent", "client_label"),
    [
        (None, ""),
        ("Bearer x", ""),
        ("Bearer x:", ""),
        ("Bearer :one", "one"),
        ("Bearer a:b:guessing_game-2", "guessing_game-2"),
        ("Bearer x:" + "y" * 32, "y" * 32),
        ("Bearer x:" + "y" * 33, ""),
        ("Bearer x:a b", ""),
        ("Bearer x:a/b", ""),
        ("Basic x:guessing", ""),
    ],
)
async def test_the_label_stands_behind_the_last_colon(
    monkeypatch: pytest.MonkeyPatch, sent: str | None, client_label: str
) -> None:
    """At most 32 letters, digits, dashes and underscores; anything else is nobody. No key is asked for here."""
    async with remembering(monkeypatch) as (served, notes):
        headers = {} if sent is None else {"authorization": sent}
        assert (await served.http.post("/generate", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert [taken[2] for taken in notes.taken] == [client_label]


@pytest.mark.parametrize(
    ("key", "label", "client_label"), [("secret", ":one", "one"), ("a:b", "", ""), ("a:b", ":one", "one")]
)
async def test_with_a_key_the_label_stands_behind_it(
    monkeypatch: pytest.MonkeyPatch, key: str, label: str, client_label: str
) -> None:
    """A key that has a colon itself is no label."""
    async with remembering(monkeypatch, api_key=key) as (served, notes):
        headers = {"authorization": f"Bearer {key}{label}"}
        assert (await served.http.post("/generate", json={"prompt": "x"}, headers=headers)).status_code == 200
        assert [taken[2] for taken in notes.taken] == [client_label]


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, False),
        ({"top_k": 20}, True),
        ({"top_k": 20, "top_p": 0.9}, True),
        ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False),
        ({"top_k": CharacterTokenizer.vocab_size}, False),
    ],
)
async def test_supports_are_recorded_where_they_are_bounded(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], recorded: bool
) -> None:
    """For the learner; a top_k of the whole vocabulary cuts nothing."""
    async with remembering(monkeypatch) as (served, _):
        assert (await served.post("/generate", prompt="x", max_tokens=2, **asked)).status_code == 200
        assert served.engine.asked[0].record_support == recorded
