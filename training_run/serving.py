"""The served engine as the HTTP server sees it: health, metrics, models by name, and scores of prompts.

And what is answered while its model is loaded.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import structlog
from prometheus_client.core import Metric
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from clotho.engine_metrics import engine_metrics
from clotho.extension import Door
from clotho.inference.engine import DecodeEngine
from clotho.lanes.compute_thread import Compute
from clotho.sampler import Sampler
from clotho.serving.auth import is_open
from clotho.serving.errors import ApiError
from clotho.serving.limits import UnreadBodyMiddleware
from clotho.serving.metrics import counter
from clotho.serving.server import BACKLOG, Connections
from clotho.serving.services import EngineAccess, Health, HealthReport
from clotho.settings.bounds import Off
from clotho.settings.server import HttpServer, ServerSection
from protocols.sampling import PromptLogprobs
from training_run.profile.schema import MonitorSection
from training_run.records.terminal_text import relative_path
from training_run.supervision.supervisor import Child, ChildState, ChildStatus, RestartPolicy, describe_error, permanent
from training_run.supervision.watchdog import ENGINE_RESTARTS, EngineGuard, Watchdog

log = structlog.get_logger(actor="pipeline")

RETRY_SECONDS = 2
"""Value of `Retry-After` while the model is loaded."""

T = TypeVar("T")

SERVER_RESTARTS = RestartPolicy(max_restarts=3)
"""How often the HTTP server is restarted."""


WATCHES: Door[[Compute, DecodeEngine], Sequence[Child]] = Door("attachment.watches")
"""Returns children that look after a decode engine, in a run and in `serve`."""

LOADING_PAGE: Door[[HttpServer], ASGIApp | None] = Door("attachment.loading_page")
"""Returns what a server answers on paths that need no key while the model is loaded; None: nothing."""


def report_failure(name: str, error: Exception) -> None:
    """Log a failure of an actor that does not end the run, or the server."""
    log.warning("actor_failed", actor=name, error=describe_error(error))


class ServingState:
    """Reads the state of the compute threads, the engine and the supervised actors.

    All methods but the coroutines return at once.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        children: Callable[[], dict[str, ChildStatus]],
        continues: str = "the server continues",
    ) -> None:
        """children: status of the supervised actors, by name.

        continues: what a failed temporary actor does not end.
        """
        self._sampler, self._children, self._continues = sampler, children, continues
        self._stalled = False

    def guards(self, settings: MonitorSection) -> list[Child]:
        """Return what reports stalls of the compute threads, looks after the engine, and restarts it if it fails."""
        sampler = self._sampler
        watchdog = Watchdog(
            "watchdog",
            lambda: sampler.compute.arbiter.busy_since,
            limit_seconds=settings.watchdog_seconds,
            on_stall=self.on_stall,
            on_recovered=self.on_recovery,
        )
        guard = EngineGuard(
            sampler.failure,
            submit=sampler.compute.decode.submit,
            fail_requests=sampler.engine.fail_all,
            attach=sampler.restart,
        )
        watches = WATCHES(sampler.compute, sampler.engine)
        return [permanent(watchdog), *chain.from_iterable(watches), permanent(guard, ENGINE_RESTARTS)]

    def on_stall(self, seconds: float) -> None:
        """Record that a compute thread has made no progress for `seconds`."""
        self._stalled = True
        log.error("compute_thread_stalled", seconds=round(seconds, 1))

    def on_recovery(self) -> None:
        """Record that it makes progress again."""
        self._stalled = False
        log.warning("compute_thread_recovered")

    def health(self) -> HealthReport:
        """The state for /health. A stalled compute thread and a decode engine that restarts are outages.

        A failed temporary actor is not.
        """
        children = {name: status.state.value for name, status in self._children().items()}
        failed = sorted(name for name, state in children.items() if state == ChildState.FAILED)
        busy = max(0.0, time.monotonic() - self._sampler.compute.arbiter.busy_since)
        report = partial(HealthReport, children=children, progress_seconds=busy)
        if self._stalled:
            return report(status="stalled", detail=f"a compute thread has made no progress for {busy:.0f} seconds")
        if children.get(EngineGuard.name) == ChildState.RESTARTING:
            return report(status="restarting", detail=f"{EngineGuard.name} restarts after a failure")
        return report(status="ok", detail=f"failed: {', '.join(failed)}; {self._continues}" if failed else "")

    async def score(self, tokens: tuple[int, ...], top: int, source: str) -> PromptLogprobs:
        """Log-probabilities of a prompt under the policy, the base model or an adapter, with `top` alternatives.

        source: as `SampleRequest.weights`. Raises RequestError for an unknown adapter.
        """
        return await self._sampler.prompt_logprobs(tokens, top=top, weights=source)

    def engine_access(self) -> EngineAccess:
        """Return the engine for attachments that control it."""
        return EngineAccess(submit=self._sampler.compute.decode.submit, engine=self._sampler.engine)

    def metrics(self, model: str, timed_out: Mapping[str, int]) -> Iterator[Metric]:
        """Yield metrics of engine, compute threads and actors, for /metrics. model, timed_out: as `engine_metrics`."""
        sampler = self._sampler
        stats, turns = sampler.engine.stats(), sampler.compute.arbiter.turn_times()
        tokens = sampler.settings.kv_cache_tokens
        yield from engine_metrics(stats, turns, kv_cache_tokens=tokens, model=model, timed_out=timed_out)
        restarts = {name: status.restarts for name, status in self._children().items()}
        yield counter("clotho_child_restarts", "Restarts of a supervised child.", restarts, by="child")


def names_of(path: str, files: Path | None) -> frozenset[str]:
    """Return the names of a base model in requests: its path, and the hub repository whose files it was loaded from."""
    cached = [part for part in (files.parts if files else ()) if part.startswith("models--")]
    repositories = [part.removeprefix("models--").replace("--", "/") for part in cached[-1:]]
    return frozenset({path, relative_path(path), *([str(files)] if files else []), *repositories})


def loading_page(settings: ServerSection) -> ASGIApp | None:
    """Return the page that the server of a run shows while the model is loaded; None if no attachment has one."""
    return None if isinstance(settings, Off) else LOADING_PAGE.first(settings)


async def while_loading(
    listener: socket.socket | None, settings: ServerSection, loading: Awaitable[T], *, page: ASGIApp | None = None
) -> T:
    """Wait for `loading`, and answer HTTP requests with status 503 meanwhile. The listener stays open.

    page: answers requests for paths that need no key, such as the page of the dashboard.
    """
    if listener is None or isinstance(settings, Off):
        return await loading
    connections = Connections(_loading_app(settings, page), send_seconds=settings.send_seconds)
    server = await asyncio.start_server(connections.handle, sock=listener.dup(), backlog=BACKLOG)
    try:
        return await loading
    finally:
        with anyio.CancelScope(shield=True):
            server.close()
            await connections.end()


def _loading_app(settings: HttpServer, page: ASGIApp | None) -> ASGIApp:
    """Return an application that answers requests with status 503; the body of /health is a `Health`.

    page: as for `while_loading`.
    """
    detail = "The model is being loaded; retry later."
    health = Health(
        status="loading",
        detail=detail,
        model=settings.model_name,
        weights_version=0,
        step=0,
        fingerprint="",
        progress_seconds=0.0,
        children={},
        findings=(),
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Show the loading page, and refuse requests with status 503, until the model is loaded."""
        if scope["type"] != "http":
            return
        if page is not None and scope["path"] != "/health" and is_open(scope["path"]):
            await page(scope, receive, send)
            return
        headers = {"retry-after": str(RETRY_SECONDS)}
        if scope["http_version"] != "2":
            headers["connection"] = "close"  # the next request goes to the server that is ready then
        response = ApiError(503, detail, code="loading", headers=headers).response()
        if scope["path"] == "/health":
            body = msgspec.json.encode(health)
            response = Response(body, status_code=503, headers=headers, media_type="application/json")
        await response(scope, receive, send)

    return UnreadBodyMiddleware(app, send_seconds=settings.send_seconds)
