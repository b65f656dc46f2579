"""Requests in flight: a cap, no leftovers after clients that leave, and a proper end when the server stops."""

from __future__ import annotations

import json

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from clotho.serving import limits, openai_responses
from protocols.errors import RequestError
from tests.serving.running_server import Served, serving

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


async def begin_stream(served: Served, **more: object) -> httpx.Response:
    """Open a stream and wait for its head."""
    request = served.http.build_request("POST", "/v1/completions", json=LONG | {"stream": True} | more)
    return await served.http.send(request, stream=True)


async def in_line(served: Served, count: int) -> None:
    """Until so many requests wait for a place."""
    with anyio.fail_after(10):
        while served.server.limit.queued != count:
            await anyio.lowlevel.checkpoint()


async def test_a_client_that_leaves_its_stream_frees_the_rows() -> None:
    """Disconnect in the middle of a stream: generation is aborted."""
    async with serving() as served:
        served.engine.allow(3)
        answer = await begin_stream(served, n=4)
        assert served.engine.running == 4
        await answer.aclose()
        await served.engine.until(lambda: served.engine.running == 0)
        assert served.engine.aborted == [1]


async def test_a_client_that_leaves_while_it_waits_frees_the_rows() -> None:
    """Disconnect before the answer: generation is aborted too, streamed or not."""
    async with serving() as served:
        served.engine.allow(0)
        for stream in (False, True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda body: served.http.post("/v1/completions", json=body), LONG | {"stream": stream})
                await served.engine.until(lambda: served.engine.running == 1)
                tasks.cancel_scope.cancel()
            await served.engine.until(lambda: served.engine.running == 0)
        assert served.engine.aborted == [1, 2]


async def test_beyond_the_cap_requests_wait_for_their_turn() -> None:
    """First come, first served, each as soon as one ends; health is still answered."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        finished: list[str] = []

        async def ask(prompt: str) -> None:
            reply = await served.post("/v1/completions", prompt=prompt, max_tokens=1)
            assert reply.status_code == 200
            finished.append(prompt)

        async with anyio.create_task_group() as tasks:
            for number, prompt in enumerate("abc"):
                tasks.start_soon(ask, prompt)
                await in_line(served, number + 1)
            assert (await served.http.get("/health")).status_code == 200
            assert (len(served.engine.asked), served.requests) == (1, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert finished == ["a", "b", "c"]
        encode = served.engine.tokenizer.encode
        assert [asked.prompt for asked in served.engine.asked] == [encode(prompt) for prompt in ("x", *"abc")]


async def test_a_client_that_leaves_the_line_is_not_served() -> None:
    """Nothing of it reaches the engine, and those behind it move up."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        behind: list[httpx.Response] = []

        async def stay() -> None:
            behind.append(await served.post("/v1/completions", prompt="b", max_tokens=1))

        async with anyio.create_task_group() as stays:
            async with anyio.create_task_group() as leaves:
                leaves.start_soon(lambda: served.post("/v1/completions", prompt="a"))
                await in_line(served, 1)
                stays.start_soon(stay)
                await in_line(served, 2)
                leaves.cancel_scope.cancel()
            await in_line(served, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert behind[0].status_code == 200
        assert len(served.engine.asked) == 2


async def test_a_body_that_is_larger_than_what_is_read_ahead_arrives_whole() -> None:
    """What came while the request waited is handed on first."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        replies: list[httpx.Response] = []

        async def ask() -> None:
            replies.append(await served.post("/v1/completions", prompt="b", max_tokens=1, user="u" * 1_000_000))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await in_line(served, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert replies[0].status_code == 200


async def test_beyond_the_line_requests_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """503 with Retry-After; a free place is taken again."""
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 0)
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        busy = await served.post("/v1/completions", prompt="x")
        assert busy.status_code == 503
        assert busy.headers["retry-after"] == "1"
        assert busy.json()["error"]["code"] == "overloaded"
        assert (await served.http.get("/health")).status_code == 200
        served.engine.allow(10**6)
        await answer.aread()
        assert (await served.post("/v1/completions", prompt="x")).status_code == 200


async def test_a_stopping_server_sends_the_line_away_at_once() -> None:
    """503 while those inside still have their time."""
    async with serving(grace_seconds=10, max_concurrent=1) as served:
        served.engine.allow(3)
        answer = await begin_stream(served)
        replies: list[httpx.Response] = []

        async def ask() -> None:
            replies.append(await served.post("/v1/completions", prompt="b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await in_line(served, 1)
            served.stop()
        assert replies[0].status_code == 503
        assert replies[0].json()["error"]["code"] == "shutting_down"
        assert served.engine.running == 1
        served.engine.allow(10**6)
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_a_full_line_in_the_engine_is_a_503_too() -> None:
    """Nothing is wrong with the request: the client is told to come back."""
    async with serving() as served:
        served.engine.refusal = RequestError("4000 completions wait already", param="queue")
        busy = await served.post("/v1/completions", prompt="x")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")


async def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error_and_done() -> None:
    """The error is an event of its own, and [DONE] still follows."""
    async with serving() as served:
        served.engine.allow(3)
        answer = await begin_stream(served)
        served.engine.submit_call(lambda: served.engine.fail("the tick raised"))
        events = (await answer.aread()).decode().strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert "the tick raised" in error["message"]
        assert error["type"] == "server_error"


async def test_an_engine_that_fails_answers_500_to_those_who_wait() -> None:
    """And the next request is answered."""
    async with serving() as served:
        served.engine.allow(0)
        answers = []

        async def ask() -> None:
            answers.append(await served.post("/v1/completions", prompt="x"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await served.engine.until(lambda: served.engine.running == 1)
            served.engine.submit_call(lambda: served.engine.fail("the tick raised"))
        assert answers[0].status_code == 500
        assert answers[0].json()["error"]["code"] == "generation_failed"
        served.engine.allow(10**6)
        assert (await served.post("/v1/completions", prompt="x")).status_code == 200


async def test_a_fault_of_ours_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the whole of it; the client, streaming or not, reads nothing of the inside."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with serving() as served:
        monkeypatch.setattr(openai_responses, "completion_logprobs", broken)
        with capture_logs() as logged:
            whole = await served.post("/v1/completions", prompt="x", logprobs=1)
            streamed = await served.post("/v1/completions", prompt="x", logprobs=1, stream=True)
        monkeypatch.undo()
        assert (whole.status_code, streamed.status_code) == (500, 200)
        assert whole.json()["error"]["code"] == "internal_error"
        for answer in (whole, streamed):
            assert "internal_error" in answer.text
            assert "secret" not in answer.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await served.post("/v1/completions", prompt="x", logprobs=1)).status_code == 200
    assert [str(entry["exc_info"]) for entry in logged] == ["secret detail"] * 2


async def test_a_stopping_server_lets_requests_finish() -> None:
    """In flight when the stop comes, whole when it is answered."""
    text = b""
    async with serving(grace_seconds=10) as served:
        served.engine.allow(3)
        answer = await begin_stream(served, seed=1)

        async def read() -> None:
            nonlocal text
            served.engine.allow(10**6)
            text = await answer.aread()

        async with anyio.create_task_group() as tasks:
            served.stop()
            tasks.start_soon(read)
    assert text.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in text


async def test_a_stopping_server_ends_what_outlives_its_patience() -> None:
    """After the grace period a stream gets an error and [DONE], a waiting client 503; no row is left."""
    outcome: dict[str, str] = {}
    async with serving(grace_seconds=0.1) as served:
        served.engine.allow(3)
        answer = await begin_stream(served)

        async def wait() -> None:
            outcome["waiting"] = str((await served.post("/v1/completions", prompt="y")).status_code)

        async def read() -> None:
            outcome["stream"] = (await answer.aread()).decode()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(read)
            await served.engine.until(lambda: served.engine.running == 2)
            served.stop()
        await served.engine.until(lambda: served.engine.running == 0)
    assert outcome["waiting"] == "503"
    assert "shutting down" in outcome["stream"]
    assert outcome["stream"].endswith("data: [DONE]\n\n")
