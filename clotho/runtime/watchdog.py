"""Notices something that ought to move and does not.

Ends the run when something that is not an actor breaks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future

import anyio


class Watchdog:
    """Reports a stall once, and its end once. It only looks: stopping or restarting is for others to decide.

    last_progress: the instant (seconds of `clock`) of the last progress; math.inf when idle, which is never a stall.
    on_stall: called with the seconds without progress, once they reach the limit.
    on_recovered: called at the first progress, or idleness, after a stall.
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
        """Look for ever, each time at the first instant at which there can be news."""
        while True:
            quiet_seconds = self.look()
            await anyio.sleep(quiet_seconds)

    def look(self) -> float:
        """Look once and report what changed. Returns in how many seconds to look again.

        While all is well that is when the limit would be reached; during a stall, a tenth of the limit, so that the
        recovery is noticed soon.
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


class Guard:
    """Waits for a future that never has a result; its error is the guard's failure."""

    def __init__(self, name: str, broken: Future[None]) -> None:
        self.name = name
        self._broken = broken

    async def run(self) -> None:
        """Wait until it breaks. Being cancelled does not touch the future: others may still have to set it."""
        await asyncio.shield(asyncio.wrap_future(self._broken))
