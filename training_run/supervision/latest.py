"""A cell that holds the newest value; its writer never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio

from protocols.queues import EndOfStream, QueueClosed
from training_run.supervision.queues import LoopThread

T = TypeVar("T")


class Latest(Generic[T]):
    """A cell with many readers. A reader misses values that are replaced before it reads them.

    Cells carry feedback between actors in a cycle, where a bounded queue could deadlock. A cell belongs to one event
    loop.
    """

    def __init__(self, name: str) -> None:
        """Create an empty cell."""
        self.name = name
        self.revision = 0  # number of values put so far
        self._values: tuple[T, ...] = ()
        self._closed = False
        self._changed = asyncio.Event()
        self._thread = LoopThread(f"cell {name!r}")

    @property
    def value(self) -> T:
        """The newest value, also after the cell was closed. Raises LookupError if the cell is empty."""
        if not self._values:
            raise LookupError(f"cell {self.name!r} is empty")
        return self._values[0]

    def put(self, value: T) -> None:
        """Replace the value and wake all readers. Raises QueueClosed if the cell was closed."""
        self._thread.check()
        if self._closed:
            raise QueueClosed(f"cell {self.name!r} was closed")
        self._values = (value,)
        self.revision += 1
        self._wake_readers()

    def close(self) -> None:
        """Accept no more values, and wake all readers. Calling it again has no effect."""
        self._thread.check()
        self._closed = True
        self._wake_readers()

    async def wait_until(self, predicate: Callable[[T], bool]) -> T:
        """Wait until the newest value satisfies the predicate, and return it.

        Raises EndOfStream if the cell is closed and its value does not satisfy the predicate.
        """
        self._thread.check()
        while not (self._values and predicate(self.value)):
            await self._next_change()
        return self.value

    async def changed(self, after: int) -> T:
        """Wait until `revision` exceeds `after`, and return the newest value.

        Raises EndOfStream if the cell is closed earlier.
        """
        self._thread.check()
        while self.revision <= after:
            await self._next_change()
        return self.value

    async def _next_change(self) -> None:
        if self._closed:
            raise EndOfStream
        await self._changed.wait()

    def _wake_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def wait_until(condition: Callable[[], bool], *cells: Latest[Any]) -> None:
    """Wait until a condition on several cells holds. The condition is evaluated whenever a cell gets a value.

    Raises EndOfStream if all cells are closed and the condition does not hold.
    """
    for cell in cells:
        cell._thread.check()
    while not condition():
        events = [cell._changed for cell in cells if not cell._closed]
        if not events:
            raise EndOfStream
        await _first_of(events)


async def _first_of(events: list[asyncio.Event]) -> None:
    async def wait(event: asyncio.Event) -> None:
        await event.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for event in events:
            tasks.start_soon(wait, event)


async def reached(cell: Latest[int], value: int, *, timeout_seconds: float) -> bool:
    """Wait until a counter is at least `value`. False after the timeout; True if the cell is closed."""
    with suppress(EndOfStream), anyio.move_on_after(timeout_seconds) as timeout:
        await cell.wait_until(lambda current: current >= value)
    return not timeout.cancelled_caught
