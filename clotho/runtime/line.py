"""Coroutines waiting in line for places: what makes a queue closable, fair, and safe to cancel.

`asyncio.Queue` cannot be closed in every supported Python, and lets a newcomer overtake those who wait. So the
queue of a mailbox only stores, and its two lines (senders for room, receivers for items) do the waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque


class _Waiter:
    """One coroutine in line: the future it awaits, for whom, and since when (monotonic seconds)."""

    __slots__ = ("future", "owner", "since")

    def __init__(self, owner: object) -> None:
        self.future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.owner = owner
        self.since = time.monotonic()


class Line:
    """First come, first served. One `admit` lets one waiter pass and keeps its place reserved until it has run.

    The owner of the places calls `admit` once for each place that falls free, and lets a newcomer pass without
    waiting only if more places are free than `reserved`. Then a place never goes to two, nor to nobody: a waiter
    cancelled after it was admitted hands its place to the next in line.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._waiters: deque[_Waiter] = deque()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time spent in line by all who ever waited, in seconds; those who still wait included."""
        now = time.monotonic()
        return self._seconds + sum(now - waiter.since for waiter in self._waiters)

    async def wait(self, owner: object) -> bool:
        """Stand in line. True: admitted, and the place must be used, or given on with `admit`. False: dismissed."""
        waiter = _Waiter(owner)
        self._waiters.append(waiter)
        try:
            admitted = await waiter.future
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise
        self.reserved -= admitted
        return admitted

    def admit(self) -> None:
        """Let the first in line pass; does nothing if nobody waits."""
        while self._waiters:
            waiter = self._waiters.popleft()
            self._seconds += time.monotonic() - waiter.since
            if not waiter.future.done():
                waiter.future.set_result(True)
                self.reserved += 1
                return

    def dismiss(self, owner: object = None) -> None:
        """Send away, empty-handed, everybody who waits for `owner`; everybody at all if it is None."""
        for waiter in [waiter for waiter in self._waiters if owner is None or waiter.owner is owner]:
            self._leave(waiter)
            if not waiter.future.done():
                waiter.future.set_result(False)

    def _give_up(self, waiter: _Waiter) -> None:
        """Leave no trace of a cancelled waiter, whatever had become of it."""
        if waiter in self._waiters:
            self._leave(waiter)
        elif not waiter.future.cancelled() and waiter.future.result():
            self.reserved -= 1
            self.admit()

    def _leave(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._seconds += time.monotonic() - waiter.since
