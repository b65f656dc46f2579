"""Actors that a test controls step by step, and a supervisor that records its reports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio import TASK_STATUS_IGNORED, create_task_group, fail_after, wait_all_tasks_blocked
from anyio.abc import TaskStatus

from training_run.supervision.supervisor import Child, Supervisor


class ScriptedActor:
    """An actor that returns or fails on command and records when it starts and stops."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        self.starts = 0
        self._cue = anyio.Event()
        self._error: BaseException | None = None

    def finish(self) -> None:
        """Let the current run, or the next one, return."""
        self._cue.set()

    def fail(self, error: BaseException | None = None) -> None:
        """Let the current run, or the next one, fail."""
        self._error = error or ValueError("failed by the test")
        self._cue.set()

    async def run(self) -> None:
        """Wait for the cue."""
        self.starts += 1
        self.events.append(f"start {self.name}")
        try:
            await self._act()
        finally:
            self.events.append(f"stop {self.name}")

    async def _act(self) -> None:
        await self._cue.wait()
        self._cue = anyio.Event()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


class ScriptedServer(ScriptedActor):
    """A scripted actor with a handshake: it reports readiness on command."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(name, events)
        self.ready_allowed = anyio.Event()

    async def run(self, *, task_status: TaskStatus[object] = TASK_STATUS_IGNORED) -> None:
        """Wait for the permission, shake hands, then wait for the cue."""
        self.starts += 1
        self.events.append(f"start {self.name}")
        try:
            await self.ready_allowed.wait()
            self.events.append(f"ready {self.name}")
            task_status.started(("127.0.0.1", 8000))
            await self._act()
        finally:
            self.events.append(f"stop {self.name}")


class RecordedSupervisor:
    """A supervisor and everything it reported."""

    def __init__(self, *children: Child, grace_seconds: float = 5.0) -> None:
        self.failures: list[tuple[str, Exception]] = []
        self.drains = 0
        self.drained, self.ended = anyio.Event(), anyio.Event()
        self.ending: str | None = None
        self.error: BaseException | None = None
        self._children = children
        self.supervisor = Supervisor(on_failure=self._on_failure, grace_seconds=grace_seconds)

    async def run(self) -> None:
        """Run the supervisor and keep how it ended."""
        try:
            self.ending = await self.supervisor.run(self._children, on_drain=self._on_drain)
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the supervisor beside the block, which begins when all actors wait; it has five seconds."""
        with fail_after(5):
            async with create_task_group() as group:
                group.start_soon(self.run)
                await wait_all_tasks_blocked()
                yield

    def reported_failures(self) -> Sequence[str]:
        """Return the failures passed to `on_failure`."""
        return [f"{name}: {error}" for name, error in self.failures]

    def states(self) -> dict[str, str]:
        """Return the state of each child by name."""
        return {name: status.state.value for name, status in self.supervisor.status().items()}

    def _on_failure(self, name: str, error: Exception) -> None:
        self.failures.append((name, error))

    def _on_drain(self) -> None:
        self.drains += 1
        self.drained.set()
