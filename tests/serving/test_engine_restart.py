"""A decode engine that fails: its requests receive errors, it restarts, and the run ends if it fails too often."""

from __future__ import annotations

from typing import Any, NoReturn

import anyio
import httpx
import pytest

from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer, base_url, listen
from clotho.serving.services import HealthReport, ServedModel, ServerContext
from clotho.settings.server import HttpServer
from protocols.errors import ActorError
from protocols.sampling import Sampling
from tests.serving.test_with_engine import Stack, base_weights, unused_prompt_logprobs
from training_run.supervision.supervisor import ChildState, RestartPolicy, Supervisor, permanent
from training_run.supervision.watchdog import EngineGuard

LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


class SupervisedServer:
    """A server and an engine with a tiny model, supervised as in a run."""

    def __init__(self, *, max_restarts: int) -> None:
        self.stack, self.broken, settings = Stack(), 0, HttpServer(port=0, shutdown_seconds=1.0)
        listener = listen(settings)
        self.url, self.supervisor = base_url(listener), Supervisor(on_failure=lambda *_: None)
        compute, engine = self.stack.compute, self.stack.engine
        services = ServerContext(
            sampler=EngineSampler(compute.decode.submit, engine),
            tokenizer=self.stack.source.tokenizer,
            settings=settings,
            sampling=Sampling(max_tokens=4),
            prompt_logprobs=unused_prompt_logprobs,
            weights=base_weights,
            models=lambda: (ServedModel(id="policy", root="policy", weights=base_weights),),
            health=lambda: HealthReport(status="restarting" if self.restarts else "ok"),
            context_length=self.stack.source.context_length,
            vocab_size=self.stack.source.vocab_size,
        )
        guard = EngineGuard(
            compute.decode.attach(engine),
            submit=compute.decode.submit,
            fail_requests=engine.fail_all,
            attach=lambda: compute.decode.attach(engine),
        )
        policy = RestartPolicy(max_restarts=max_restarts, first_pause_seconds=0.2)
        self.children = [permanent(ApiServer(services, listener=listener)), permanent(guard, policy)]

    @property
    def restarts(self) -> bool:
        """Whether the engine waits for its restart."""
        status = self.supervisor.status().get(EngineGuard.name)
        return status is not None and status.state == ChildState.RESTARTING

    def break_engine(self, *, times: int) -> None:
        """Let the next steps of the engine raise where the engine does not expect it."""
        engine = self.stack.engine
        remove = engine._remove_ended

        def defect() -> None:
            self.broken += 1
            if self.broken > times:
                return remove()
            raise_defect()

        engine._remove_ended = defect  # type: ignore[method-assign]

    async def running(self, rows: int) -> None:
        """Wait until this number of completions is in the engine."""
        with anyio.fail_after(20):
            while await self.stack.rows() < rows:
                await anyio.lowlevel.checkpoint()


def raise_defect() -> NoReturn:
    """Fail."""
    raise LookupError("a defect")


async def test_a_failed_engine_fails_its_requests_and_restarts() -> None:
    """A whole response is a 500, and a stream ends with an error and [DONE]. /health is 503 until the restart."""
    served, answers = SupervisedServer(max_restarts=1), dict[str, httpx.Response]()
    try:
        async with anyio.create_task_group() as tasks, httpx.AsyncClient(base_url=served.url, timeout=20) as http:

            async def run() -> None:
                await served.supervisor.run(served.children, on_drain=lambda: None)

            async def post(name: str, **fields: Any) -> None:
                answers[name] = await http.post("/v1/completions", json=LONG | fields)

            tasks.start_soon(run)
            async with anyio.create_task_group() as posts:
                posts.start_soon(post, "whole")
                await served.running(1)
                async with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
                    await served.running(2)
                    served.stack.compute.decode.submit(lambda: served.break_engine(times=1))
                    text = (await stream.aread()).decode()
                with anyio.fail_after(20):
                    while not served.restarts:
                        await anyio.lowlevel.checkpoint()
                assert (await http.get("/health")).status_code == 503
            assert answers["whole"].status_code == 500
            assert answers["whole"].json()["error"]["code"] == "generation_failed"
            assert "a defect" in text
            assert text.endswith("data: [DONE]\n\n")
            await post("next", max_tokens=2)
            assert answers["next"].status_code == 200
            with anyio.fail_after(20):
                while served.restarts:  # the engine decodes before its guard has reported that it runs
                    await anyio.lowlevel.checkpoint()
            assert (await http.get("/health")).status_code == 200
            assert await served.stack.rows() == 0
            served.supervisor.stop()
    finally:
        served.stack.compute.stop()


async def test_an_engine_that_fails_too_often_ends_the_run() -> None:
    """The error names the engine and the defect."""
    served = SupervisedServer(max_restarts=1)
    try:
        served.break_engine(times=10**9)
        async with anyio.create_task_group() as tasks, httpx.AsyncClient(base_url=served.url, timeout=20) as http:

            async def keep_asking() -> None:
                while True:
                    try:
                        await http.post("/v1/completions", json=LONG)
                    except httpx.HTTPError:
                        await anyio.lowlevel.checkpoint()

            tasks.start_soon(keep_asking)
            with pytest.raises(ActorError, match=r"decode engine.*a defect"), anyio.fail_after(20):
                await served.supervisor.run(served.children, on_drain=lambda: None)
            tasks.cancel_scope.cancel()
    finally:
        served.stack.compute.stop()
