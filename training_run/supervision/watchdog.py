"""Checks beside the actors: stalls of start and compute thread, and failures of the decode engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus

from clotho.lanes.compute_thread import finish
from protocols.errors import error_text
from training_run.supervision.supervisor import RestartPolicy

ENGINE_RESTARTS = RestartPolicy(max_restarts=3, first_pause_seconds=0.5)


class Watchdog:
    """Reports the start and the end of each stall. It does not stop or restart any actor.

    last_progress: time of the last progress, in seconds of `clock`; math.inf while idle, which is not a stall.
    on_stall: called with the seconds without progress when they reach the limit.
    on_recovered: called at the first progress, or when idle, after a stall.
    """

    def __init__(
        self,
        name: str,
        last_progress: Callable[[], float],
        *,
        limit_seconds: float,
        on_stall: Callable[[float], None],
        on_recovered: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if limit_seconds <= 0:
            raise ValueError(f"watchdog {name!r} needs a limit above 0 seconds, not {limit_seconds}")
        self.name = name
        self.stalled = False
        self._last_progress = last_progress
        self._limit = limit_seconds
        self._on_stall, self._on_recovered = on_stall, on_recovered
        self._clock = clock

    async def run(self) -> None:
        """Check whenever the state can have changed, until cancelled."""
        while True:
            quiet_seconds = self.look()
            await anyio.sleep(quiet_seconds)

    def look(self) -> float:
        """Check once and report a change. Returns the seconds until the next check.

        Without a stall this is the time until the limit is reached; during a stall it is a tenth of the limit.
        """
        silent = self._clock() - self._last_progress()
        if silent < self._limit:
            if self.stalled:
                self.stalled = False
                self._on_recovered()
            return min(self._limit - silent, self._limit)
        if not self.stalled:
            self.stalled = True
            self._on_stall(silent)
        return self._limit / 10


class StartupWatch:
    """Reports phases of the start that take long. Uses threads, because user code can block the event loop.

    on_slow: called in a thread with the name of the phase, its seconds so far, and what to do, every `limit_seconds`
    of a phase.
    """

    thread_name = "startup watch"

    def __init__(self, *, limit_seconds: float, on_slow: Callable[[str, float, str], None]) -> None:
        self._limit, self._on_slow = limit_seconds, on_slow

    @contextmanager
    def phase(self, name: str, hint: str = "interrupt to end the process") -> Iterator[None]:
        """Watch the block. hint: what to do if it takes long."""
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(name, hint, ended), name=self.thread_name, daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _watch(self, name: str, hint: str, ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.wait(self._limit):
            self._on_slow(name, time.monotonic() - began, hint)


class EngineGuard:
    """Fails if the decode engine fails, after all its requests have failed. Each further `run` restarts the engine.

    broken: gets an exception if a decode step raises; never a result.
    fail_requests: fails all requests of the engine and frees its rows. Runs in the decode thread.
    attach: lets the decode thread decode again; returns the next `broken`.
    """

    name = "decode engine"

    def __init__(
        self,
        broken: Future[None],
        *,
        submit: Callable[[Callable[[], None]], Future[None]],
        fail_requests: Callable[[str], None],
        attach: Callable[[], Future[None]],
    ) -> None:
        self._broken, self._submit, self._fail_requests, self._attach = broken, submit, fail_requests, attach

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Wait for the exception. Cancelling the guard does not cancel the future."""
        if self._broken.done():
            self._broken = await anyio.to_thread.run_sync(self._attach)
        task_status.started()
        try:
            await asyncio.shield(asyncio.wrap_future(self._broken))
        except Exception as error:
            reason = f"the decode engine failed: {type(error).__name__}: {error_text(error)}"
            await finish(self._submit(lambda: self._fail_requests(reason)))
            raise
