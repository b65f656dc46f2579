"""The feedback arrow: a cell that holds the newest value and never makes its writer wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio

from clotho.runtime.queues import LoopThread
from protocols.queues import EndOfStream, QueueClosed

T = TypeVar("T")


class Latest(Generic[T]):
    """A newest-wins cell with many readers: a value replaced before it was seen is never seen.

    It closes a cycle of actors, where a bounded queue could deadlock. Of one event loop, like a mailbox.
    """

    def __init__(self, name: str) -> None:
        """Make an empty cell."""
        self.name = name
        self.revision = 0  # how many values were ever put
        self._values: tuple[T, ...] = ()
        self._closed = False
        self._news = asyncio.Event()
        self._thread = LoopThread(f"cell {name!r}")

    @property
    def value(self) -> T:
        """The newest value, readable also after the close. Raises LookupError while there is none."""
        if not self._values:
            raise LookupError(f"cell {self.name!r} is empty: nothing was put into it yet")
        return self._values[0]

    def put(self, value: T) -> None:
        """Replace the value and wake every reader. Raises QueueClosed after the close."""
        self._thread.check()
        if self._closed:
            raise QueueClosed(f"cell {self.name!r} was closed")
        self._values = (value,)
        self.revision += 1
        self._tell()

    def close(self) -> None:
        """Let no more values come, and end those who wait for one. The second time does nothing."""
        self._thread.check()
        self._closed = True
        self._tell()

    async def wait_until(self, predicate: Callable[[T], bool]) -> T:
        """Return the newest value as soon as it satisfies the predicate; at once if it does already.

        Raises EndOfStream if the cell is closed on a value that does not; what the predicate raises comes out here.
        """
        self._thread.check()
        while not (self._values and predicate(self.value)):
            await self._more()
        return self.value

    async def changed(self, after: int) -> T:
        """Return the newest value once more than `after` were put; `revision` says how many, for the next call.

        Raises EndOfStream if the cell is closed before.
        """
        self._thread.check()
        while self.revision <= after:
            await self._more()
        return self.value

    async def _more(self) -> None:
        if self._closed:
            raise EndOfStream
        await self._news.wait()

    def _tell(self) -> None:
        heard, self._news = self._news, asyncio.Event()
        heard.set()


async def wait_until(condition: Callable[[], bool], *cells: Latest[Any]) -> None:
    """Return as soon as a condition on several cells holds; at once if it does already.

    It is looked at again whenever one of them gets a value. Raises EndOfStream if all are closed and it does not hold;
    what the condition raises comes out here.
    """
    for cell in cells:
        cell._thread.check()
    while not condition():
        news = [cell._news for cell in cells if not cell._closed]
        if not news:
            raise EndOfStream
        await _first_of(news)


async def _first_of(events: list[asyncio.Event]) -> None:
    async def hear(event: asyncio.Event) -> None:
        await event.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for event in events:
            tasks.start_soon(hear, event)
