"""Work that is done one item at a time, and taken fairly from the sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from clotho.lanes.fair_queue import FairQueue

T = TypeVar("T")
Turn = asyncio.Future[None]


class Turns:
    """Work of sessions, in order for each of them, and one item at a time. All methods belong to the event loop.

    While others wait, a session waits for at most one item of each of them beyond its equal share (`FairQueue`).
    """

    def __init__(self) -> None:
        self._queue, self._turn = FairQueue[Turn](), None  # type: FairQueue[Turn], Turn | None

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return self._queue.length

    def put(self, session: str, cost: float, work: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Queue work of a session, and return what awaits its result. cost: such as its number of tokens."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queue.put(session, turn, max(1.0, cost))
        task = asyncio.create_task(self._run(turn, work))
        task.add_done_callback(lambda _: self._ended(turn))
        self._next()
        return task

    async def _run(self, turn: Turn, work: Callable[[], Awaitable[T]]) -> T:
        await turn
        return await work()

    def _ended(self, turn: Turn) -> None:
        turn.cancel()
        if turn is self._turn:
            self._turn = None
        self._next()

    def _next(self) -> None:
        while self._turn is None and self._queue.length:
            turn = self._queue.take()
            if not turn.done():  # else nobody waits for it any more
                self._turn = turn
                turn.set_result(None)
