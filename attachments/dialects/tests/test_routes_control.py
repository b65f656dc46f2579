"""Routes that pause the engine and abort requests, with a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from msgspec import structs

from attachments.dialects.sections import ALLOW_PAUSE
from clotho.lanes.compute_thread import finish
from clotho.serving.server import ApiServer
from clotho.serving.services import EngineAccess
from clotho.settings.server import HttpServer
from protocols.sampling import SampleRequest, Sampling
from tests.serving.test_with_engine import Stack, services_of

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


@asynccontextmanager
async def serving(*, may_pause: bool = True) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """Serve a tiny model whose engine clients control."""
    stack = Stack()
    access = EngineAccess(submit=stack.compute.decode.submit, engine=stack.engine)
    settings = ALLOW_PAUSE.put(HttpServer(port=0, shutdown_seconds=0.2, max_concurrent=2), may_pause)
    context = structs.replace(services_of(stack), engine=access, settings=settings)
    try:
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(ApiServer(context).run)
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                yield stack, client
            tasks.cancel_scope.cancel()
    finally:
        stack.compute.stop()


class Background:
    """A request in the background; `answer` is its response once it has ended."""

    def __init__(self) -> None:
        self.answer: httpx.Response | None = None
        self.ended = anyio.Event()

    async def post(self, client: httpx.AsyncClient, route: str, fields: dict[str, Any]) -> None:
        """Send the request."""
        self.answer = await client.post(route, json=fields)
        self.ended.set()


async def until(condition: Callable[[], Any]) -> None:
    """Wait until an asynchronous condition holds."""
    with anyio.fail_after(30):
        while not await condition():
            await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("route", "body"), [("/pause", {}), ("/pause_generation", {"mode": "abort"})], ids=["vllm", "sglang"]
)
async def test_a_pause_ends_running_requests_and_holds_new_ones(route: str, body: dict[str, str]) -> None:
    """Aborted requests end with finish_reason `abort`; new ones begin after `resume`."""
    async with serving() as (stack, client), anyio.create_task_group() as tasks:
        first, second = Background(), Background()
        await client.post("/pause", params={"mode": "keep"})
        tasks.start_soon(first.post, client, "/v1/completions", LONG)
        await until(stack.rows)
        assert (await client.post(route, json=body)).json() == {"status": "paused"}
        await first.ended.wait()
        assert first.answer is not None
        assert first.answer.json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        tasks.start_soon(second.post, client, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        await until(stack.rows)
        assert not second.ended.is_set()
        assert (await client.post("/resume")).json() == {"status": "resumed"}
        await second.ended.wait()
        assert second.answer is not None
        assert second.answer.status_code == 200
        assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_requests_that_are_kept_continue_where_they_stood() -> None:
    """The completion equals that of a request without a pause."""
    fields = LONG | {"seed": 1, "return_token_ids": True}
    async with serving() as (stack, client), anyio.create_task_group() as tasks:
        undisturbed = (await client.post("/v1/completions", json=fields)).json()["choices"][0]["token_ids"]
        kept = Background()
        tasks.start_soon(kept.post, client, "/v1/completions", fields)
        await until(stack.rows)
        await client.post("/pause", params={"mode": "keep"})
        steps = (await finish(stack.compute.decode.submit(stack.engine.stats))).decode_steps
        await client.get("/is_paused")
        again = (await finish(stack.compute.decode.submit(stack.engine.stats))).decode_steps
        assert again == steps
        await client.post("/continue_generation")
        await kept.ended.wait()
        assert kept.answer is not None
        assert kept.answer.json()["choices"][0]["token_ids"] == undisturbed


async def test_a_pause_can_wait_for_running_requests() -> None:
    """They finish normally, and the response of the pause follows them."""
    async with serving() as (stack, client), anyio.create_task_group() as tasks:
        running = Background()
        tasks.start_soon(running.post, client, "/v1/completions", LONG)
        await until(stack.rows)
        await client.post("/pause", params={"mode": "wait"})
        await running.ended.wait()
        assert running.answer is not None
        assert running.answer.json()["choices"][0]["finish_reason"] == "length"
        assert await stack.rows() == 0


async def test_control_routes_answer_while_paused_requests_use_all_slots() -> None:
    """They are not subject to `server.max_concurrent`."""
    async with serving() as (stack, client), anyio.create_task_group() as tasks:
        await client.post("/pause")
        waiting = [Background() for _ in range(4)]
        for one in waiting:
            tasks.start_soon(one.post, client, "/v1/completions", {"prompt": "x", "max_tokens": 2})

        async def full() -> bool:
            return await stack.rows() == 2

        await until(full)
        assert (await client.post("/resume")).status_code == 200
        for one in waiting:
            await one.ended.wait()
        assert all(one.answer is not None and one.answer.status_code == 200 for one in waiting)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/abort_requests", {"request_ids": ["cmpl-mine"]}),
        ("/abort_request", {"rid": "mine"}),
        ("/abort_request", {"abort_all": True}),
    ],
)
async def test_a_request_is_aborted_by_its_name(route: str, body: dict[str, Any]) -> None:
    """Rollouts of a training run are not affected."""
    async with serving(may_pause=False) as (stack, client), anyio.create_task_group() as tasks:
        sampling = Sampling(max_tokens=50, ignore_eos=True)
        rollout = SampleRequest(prompt=(1,), sampling=sampling, seeds=(1,), background=True)
        events: list[Any] = []

        def submit() -> None:
            stack.engine.held = "everything"
            stack.engine.submit(rollout, events.append)

        await finish(stack.compute.decode.submit(submit))
        mine = Background()
        tasks.start_soon(mine.post, client, "/v1/completions", LONG | {"request_id": "mine"})

        async def both() -> bool:
            return await stack.rows() == 2

        await until(both)
        aborted = (await client.post(route, json=body)).json()
        assert aborted["status"] == "aborted"
        await mine.ended.wait()
        assert mine.answer is not None
        assert mine.answer.json()["id"] == "cmpl-mine"
        assert mine.answer.json()["choices"][0]["finish_reason"] == "abort"

        def release() -> None:
            stack.engine.held = "nothing"

        await finish(stack.compute.decode.submit(release))

        async def ended() -> bool:
            return bool(events)

        await until(ended)
        assert events[-1].completion.finish_reason == "length"


async def test_sleep_frees_caches_until_the_engine_wakes_up() -> None:
    """Level 2 is refused, because the weights stay in memory."""
    async with serving() as (stack, client):
        await client.post("/v1/completions", json={"prompt": "a long prompt", "max_tokens": 2})
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
        slept = (await client.post("/sleep", params={"level": 1})).json()
        assert (slept["status"], slept["level"]) == ("sleeping", 1)
        stats = await finish(stack.compute.decode.submit(stack.engine.stats))
        assert (stats.prefix_cache_tokens, stats.cache_tokens) == (0, 0)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.post("/wake_up")).json()["status"] == "awake"
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        for level in ("2", "-1", "x"):
            refused = await client.post("/sleep", params={"level": level})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")


async def test_a_training_run_is_not_paused_unless_its_profile_permits_it() -> None:
    """Status 403; requests continue."""
    async with serving(may_pause=False) as (_, client):
        for route in ("/pause", "/resume", "/sleep", "/wake_up", "/continue_generation"):
            refused = await client.post(route)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "control_disabled")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})).status_code == 200


@pytest.mark.parametrize(
    ("route", "options", "param"),
    [
        ("/pause", {"params": {"mode": "now"}}, "mode"),
        ("/pause", {"params": {"clear_cache": "maybe"}}, "clear_cache"),
        ("/pause_generation", {"json": {"mode": "keep"}}, "mode"),
        ("/abort_requests", {"json": {}}, "request_ids"),
        ("/abort_request", {"json": {}}, "rid"),
    ],
)
async def test_an_invalid_request_is_refused(route: str, options: dict[str, Any], param: str) -> None:
    """The error names the parameter."""
    async with serving() as (_, client):
        answer = await client.post(route, **options)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
