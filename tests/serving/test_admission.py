"""The admission of requests: fair between clients, and limited in time."""

from __future__ import annotations

import anyio
import pytest

from clotho.serving import limits
from clotho.serving.auth import Client
from tests.serving.running_server import serving
from tests.serving.test_limits import begin_stream, wait_for_queue


async def test_waiting_requests_are_admitted_fairly_between_clients() -> None:
    """On a loopback address, a label makes a client of its own: it waits for one request of another client."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        finished: list[str] = []

        async def post(prompt: str, label: str) -> None:
            body, headers = {"prompt": prompt, "max_tokens": 1}, {"authorization": f"Bearer none:{label}"}
            assert (await served.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            finished.append(prompt)

        async with anyio.create_task_group() as tasks:
            for number, prompt in enumerate(("m1", "m2", "m3", "v1")):
                tasks.start_soon(post, prompt, "many" if prompt.startswith("m") else "visitor")
                await wait_for_queue(served, number + 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert finished == ["m1", "v1", "m2", "m3"]
        assert [request.client for request in served.engine.requests[1:3]] == ["127.0.0.1/many", "127.0.0.1/visitor"]


async def test_a_request_that_waits_too_long_for_admission_is_a_503() -> None:
    """Its place in the queue is free again. The engine gets the time that is left of the limit."""
    async with serving(max_concurrent=1, max_queue_seconds=0.05, max_answer_seconds=7.0) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        late = await served.post("/v1/completions", prompt="x")
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert late.json()["error"]["code"] == "overloaded"
        assert served.server.limit.queued == 0
        assert served.server.limit.timed_out == 1
        served.engine.allow(10**6)
        await answer.aread()
        (request,) = served.engine.requests
        assert 0 < request.wait_seconds <= 0.05
        assert request.answer_seconds == 7.0


@pytest.mark.parametrize(
    ("free", "waiting", "client", "is_full"),
    [
        (0, "mmm", "m", False), (0, "mmmm", "m", True), (0, "mmmm", "a", False), (1, "mmmm", "m", False),
        (0, "mmmma", "a", True), (0, "mmmma", "b", False), (0, "mmmmabc", "d", True),
        (0, "mmmmmmm", "a", False), (0, "mmmmmmmm", "a", True), (1, "mmmmmmmm", "a", False),
    ],
)  # fmt: skip
def test_a_full_queue_takes_requests_of_clients_with_less_than_an_equal_part(
    monkeypatch: pytest.MonkeyPatch, free: int, waiting: str, client: str, is_full: bool
) -> None:
    """Of a queue for four, one client cannot keep others out; one of eight takes none. A letter is a request."""
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 4)
    limit = limits.ConcurrencyLimit(free)
    for name in waiting:
        limit._queue.put(name, anyio.Event(), 1.0)
    assert limit.is_full(Client(name=client, arrived=0.0)) == is_full
