"""Quotas of API keys, as a class and over HTTP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from attachments.keys.api_keys import KeyLimits, Quota
from clotho.serving import auth
from clotho.serving.errors import ApiError
from tests.serving.running_server import Served, serving

ALICE, BOB, OLD = "alice-s3cret", "bob-s3cret", "server-s3cret"
KEYS = f"""
[alice]
key = "{ALICE}"
max_requests = 1
max_queued_tokens = 300
tokens_per_minute = 1200
[bob]
key = "{BOB}"
"""


class Clock:
    """A clock that the test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.seconds


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 600), st.floats(0.0, 1.0)), max_size=60))
def test_no_minute_has_more_tokens_than_two_allowances(requests: list[tuple[float, int, float]]) -> None:
    """A token bucket: what it holds at the start of a minute, and what it gains during it."""
    clock = Clock()
    quota = Quota(KeyLimits(tokens_per_minute=600), clock)
    used: list[tuple[float, int]] = []
    for pause, tokens, part in requests:
        clock.seconds += pause
        try:
            with quota.reserved(tokens) as reservation:
                reservation.unused = int(part * tokens)
                used.append((clock.seconds, tokens - reservation.unused))
        except ApiError as refusal:
            clock.seconds += int(refusal.headers["retry-after"])
            with quota.reserved(tokens):
                used.append((clock.seconds, tokens))
    for start, _ in used:
        assert sum(tokens for time, tokens in used if start <= time < start + 60) <= 1200


def test_a_request_that_never_fits_is_not_asked_to_try_again() -> None:
    """Status 400 instead of 429."""
    quota = Quota(KeyLimits(tokens_per_minute=100, max_queued_tokens=50))
    with pytest.raises(ApiError) as refusal, quota.reserved(51):
        pass
    assert (refusal.value.status, refusal.value.body.error.code) == (400, "request_too_large")
    assert quota.refused == {}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """Return the path of a file of keys."""
    path = tmp_path / "keys.toml"
    path.write_text(KEYS, encoding="utf-8")
    path.chmod(0o600)
    return str(path)


async def post(served: Served, key: str, **fields: Any) -> httpx.Response:
    """Complete a prompt of one token with a key."""
    body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True, **fields}
    return await served.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def assert_limited(answer: httpx.Response, kind: str) -> None:
    """Check a refusal: OpenAI's shape."""
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", kind)
    assert int(answer.headers["retry-after"]) >= 1


async def test_every_key_of_the_file_is_accepted_and_no_other(keys: str) -> None:
    """Beside server.api_key, which has no limits. A label may follow."""
    async with serving(api_keys_file=keys, api_key=OLD) as served:
        for key in (ALICE, BOB, OLD, f"{ALICE}:label"):
            assert (await post(served, key)).status_code == 200
        for key in ("-", "s3cret", f"{ALICE}x", f"x{ALICE}", "alice", f"{ALICE}:a:b"):
            assert (await post(served, key)).status_code == 401
        assert [request.client for request in served.engine.requests] == ["alice", "bob", "127.0.0.1/", "alice"]


async def test_requests_and_queued_tokens_of_a_key_are_limited(keys: str) -> None:
    """The other keys are not affected, and the key is accepted again when its request has ended."""
    async with serving(api_keys_file=keys) as served:
        served.engine.allow(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, served, ALICE)
            await served.engine.wait_until(lambda: served.engine.running == 1)
            assert_limited(await post(served, ALICE), "requests")
            served.engine.allow(10**6)
            assert (await post(served, BOB)).status_code == 200
        assert (await post(served, ALICE)).status_code == 200
        too_large = await post(served, ALICE, max_tokens=300)
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (400, "request_too_large")
        metrics = (await served.http.get("/metrics", headers={"authorization": f"Bearer {BOB}"})).text
        assert 'clotho_rate_limited_requests_total{key="alice",limit="max_requests"} 1.0' in metrics


async def test_tokens_per_minute_of_a_key_are_limited(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and scores of prompts count too. Unused tokens are returned: 40 short answers count as such."""
    monkeypatch.setattr(auth, "Quota", partial(Quota, clock=Clock()))
    async with serving(api_keys_file=keys) as served:
        for number in range(40):
            answer = await post(served, ALICE, max_tokens=290, stop_token_ids=list(range(97)), stream=number % 2 == 1)
            assert answer.status_code == 200
        scored = {"echo": True, "logprobs": 1, "prompt": "x" * 250}
        refused = [
            answer
            for max_tokens in (0, 40, 0, 40)
            if (answer := await post(served, ALICE, max_tokens=max_tokens, **scored)).status_code != 200
        ]
        assert_limited(refused[0], "tokens")
        stream = await post(served, ALICE, max_tokens=290, stream=True)
        assert_limited(stream, "tokens")
        assert (await post(served, BOB, max_tokens=290)).status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_completions_that_reach_their_limit_return_no_tokens(
    keys: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of 291 tokens with their prompt fit into the 1200 of a minute."""
    monkeypatch.setattr(auth, "Quota", partial(Quota, clock=Clock()))
    async with serving(api_keys_file=keys) as served:
        answers = [await post(served, ALICE, max_tokens=290, stream=stream) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 429]


async def test_an_aborted_request_frees_its_place_in_the_quota(keys: str) -> None:
    """Requests in flight and queued tokens end with the connection."""
    async with serving(api_keys_file=keys) as served:
        served.engine.allow(0)
        for stream in (False, True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda stream: post(served, ALICE, max_tokens=250, stream=stream), stream)
                await served.engine.wait_until(lambda: served.engine.running == 1)
                tasks.cancel_scope.cancel()
            await served.engine.wait_until(lambda: served.engine.running == 0)
        served.engine.allow(10**6)
        with anyio.fail_after(10):
            while (await post(served, ALICE, max_tokens=250)).status_code == 429:
                await anyio.lowlevel.checkpoint()


async def test_keys_appear_neither_in_the_log_nor_in_errors_nor_in_metrics(keys: str) -> None:
    """Of accepted and of refused requests."""
    texts: list[str] = []
    with capture_logs() as events:
        async with serving(api_keys_file=keys, api_key=OLD) as served:
            for key in (ALICE, BOB, OLD, f"{ALICE}x", f"{BOB}:{BOB}"):
                requests: list[dict[str, Any]] = [{}, {"max_tokens": 300}, {"unknown": key}, {"model": "other"}]
                texts += [(await post(served, key, **fields)).text for fields in requests]
            texts.append((await served.http.get("/metrics", headers={"authorization": f"Bearer {BOB}"})).text)
    assert "s3cret" not in "".join(texts) + repr(events)
