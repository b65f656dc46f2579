"""An HTTP server on a free port, with a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import anyio
import httpx
from anyio.abc import TaskStatus
from msgspec import structs
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client.core import Metric

from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer
from clotho.serving.services import EngineAccess, HealthReport, ServedModel, ServerContext, no_metrics
from clotho.settings.server import HttpServer
from protocols.sampling import PromptLogprobs, Sampling
from protocols.step import WeightsReady
from tests.fakes import CharacterTokenizer, FakeEngine
from training_run.profile.mounted import with_attachments

CONTEXT = 512
HTTP_SERVER: Callable[..., HttpServer] = with_attachments(HttpServer, "server")
"""The settings of a server with those of attachments."""

JSON = {"content-type": "application/json"}


class Served:
    """A running server and its parts. Tests may replace `weights`, `health` and `measured`."""

    def __init__(self, engine: FakeEngine, sampler: EngineSampler) -> None:
        self.engine, self.sampler = engine, sampler
        self.weights = WeightsReady(version=3, step=4, fingerprint="f3")
        self.health = HealthReport(status="ok", children={"learner": "running"}, progress_seconds=0.5)
        self.measured: Callable[[Mapping[str, int]], Iterable[Metric]] = no_metrics
        self.scored: list[tuple[tuple[int, ...], int]] = []
        self.url = ""
        self.server: ApiServer
        self.requests = 0
        self.scope = anyio.CancelScope()
        self.http: httpx.AsyncClient

    @cached_property
    def openai(self) -> AsyncOpenAI:
        """A client of OpenAI, whose certificates would take as long to load as the server to start."""
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=20, http_client=http)

    async def prompt_logprobs(self, tokens: tuple[int, ...], top: int, _: str) -> PromptLogprobs:
        """Return -t / 8 for token t; its alternatives are t, t + 1, ..., each with a log-probability lower by 1."""
        self.scored.append((tokens, top))
        return PromptLogprobs(
            version=self.weights.version,
            logprobs=tuple(-token / 8 for token in tokens[1:]),
            top_logprobs=tuple(tuple((token + k, -token / 8 - k) for k in range(top)) for token in tokens[1:]),
        )

    def count_request(self) -> None:
        """Count an admitted request."""
        self.requests += 1

    def stop(self) -> None:
        """Stop the server."""
        self.scope.cancel()

    async def post(self, route: str, **fields: Any) -> httpx.Response:
        """Send a POST request with a JSON body."""
        return await self.http.post(route, json=fields)


def server_context(served: Served, **settings: Any) -> ServerContext:
    """Return the server context; keyword arguments are keys of [server]."""
    return ServerContext(
        sampler=served.sampler,
        tokenizer=served.engine.tokenizer,
        settings=structs.replace(HTTP_SERVER(port=0, shutdown_seconds=1.0, allow_pause=True), **settings),
        sampling=Sampling(max_tokens=16),
        prompt_logprobs=served.prompt_logprobs,
        weights=lambda: served.weights,
        models=lambda: (
            ServedModel(
                id=settings.get("model_name", "policy"),
                aliases=frozenset({"models/base-alias"}),
                parent="models/base",
                root="models/base",
                weights=lambda: served.weights,
            ),
        ),
        health=lambda: served.health,
        measure=lambda timed_out: served.measured(timed_out),
        engine=EngineAccess(submit=served.engine.submit_call, engine=served.engine),
        context_length=CONTEXT,
        vocab_size=CharacterTokenizer.vocab_size,
    )


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Served]:
    """Serve on a free port until the block ends; keyword arguments are keys of [server]."""
    engine = FakeEngine()
    engine.version = 3
    served = Served(engine, EngineSampler(engine.submit_call, engine))
    served.server = ApiServer(server_context(served, **settings), on_request=served.count_request)

    async def run(*, task_status: TaskStatus[str]) -> None:
        with served.scope:
            await served.server.run(task_status=task_status)

    try:
        async with anyio.create_task_group() as tasks:
            served.url = await tasks.start(run)
            async with httpx.AsyncClient(base_url=served.url, timeout=20, headers=JSON, verify=False) as served.http:
                yield served
            if "openai" in vars(served):
                await served.openai.close()
            served.stop()
    finally:
        engine.close()
