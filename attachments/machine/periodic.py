"""Checks and readings of the machine, again and again while a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from clotho.lanes.daemon_threads import DaemonThreads

T = TypeVar("T")


class PeriodicCheck:
    """Calls `check`, which must return at once, every `seconds`, until cancelled."""

    def __init__(self, name: str, check: Callable[[], None], *, seconds: float) -> None:
        self.name, self.check = name, check
        self._seconds = seconds

    async def run(self) -> None:
        """Check at the start and after each pause."""
        while True:
            self.check()
            await anyio.sleep(self._seconds)


class PeriodicReading(Generic[T]):
    """Calls `read` in a daemon thread, and `take` with its result in the event loop, every `seconds`."""

    def __init__(self, name: str, read: Callable[[], T], take: Callable[[T], None], *, seconds: float) -> None:
        self.name, self._read, self._take, self._seconds = name, read, take, seconds
        self._threads = DaemonThreads(name, 1, wait_seconds=math.inf, work_seconds=math.inf)

    async def run(self) -> None:
        """Read at the start and after each pause."""
        while True:
            self._take(await self._threads.run(self._read))
            await anyio.sleep(self._seconds)
