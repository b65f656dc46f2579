"""The embedded policy, served as by a run, with a recorder of all completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from msgspec import structs
from starlette.requests import Request

from attachments.atropos.sample_log import SampleLog
from clotho.serving.auth import client_of
from clotho.serving.server import ApiServer
from clotho.serving.services import HealthReport, Recording
from clotho.settings.server import HttpServer
from protocols.sampling import Completion, SampleRequest
from tests.training_run.built_context import open_context, tiny_profile
from training_run.run import RunContext
from training_run.run_monitor import RunMonitor

EMBEDDED = Path(__file__).parents[2] / "profiles" / "embedded"


class RecordedCompletions:
    """The sample log, and all recorded completions in order."""

    def __init__(self) -> None:
        self.log = SampleLog()
        self.taken: list[tuple[SampleRequest, Completion, str]] = []
        self.health: list[HealthReport] = []
        self.heard = anyio.Event()

    async def begin(self, http: Request, _: Sequence[SampleRequest], /) -> Recording:
        """Record under the label of the client."""
        return Recording(remember=partial(self.remember, client_label=client_of(http.scope).label))

    def remember(self, request: SampleRequest, completion: Completion, /, *, client_label: str) -> None:
        """Record a completion."""
        self.log.remember(request, completion, client_label=client_label)
        self.taken.append((request, completion, client_label))
        self.heard.set()

    def of(self, client_label: str, *, health: bool = False) -> list[tuple[SampleRequest, Completion]]:
        """Return the completions of a client, or those of its health checks, which sample one token."""
        return [
            (request, completion)
            for request, completion, label in self.taken
            if label == client_label and (request.sampling.max_tokens == 1) == health
        ]


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[str, RunContext, RecordedCompletions]]:
    """Serve the embedded policy."""
    profile = tiny_profile(
        directory,
        model={"path": str(EMBEDDED)},
        data={"train": str(EMBEDDED / "train.jsonl")},
        server={"type": "http", "port": 0},
    )
    notes = RecordedCompletions()
    async with open_context(profile) as parts:
        monitor = RunMonitor(parts, queues=[], children=dict)

        def health() -> HealthReport:
            notes.health.append(monitor.serving.health())
            return notes.health[-1]

        services = structs.replace(
            monitor.server_context(HttpServer(port=0, shutdown_seconds=1.0)),
            sample_log=notes,
            record_supports=True,
            health=health,
        )
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(ApiServer(services).run)
            yield url, parts, notes
            tasks.cancel_scope.cancel()
