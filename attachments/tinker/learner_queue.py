"""One learner thread for all models: its work is taken fairly from the sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from clotho.lanes.compute_thread import finish
from clotho.lanes.fair_queue import FairQueue
from clotho.lanes.sampling_client import Submit

T = TypeVar("T")
Turn = asyncio.Future[None]


class LearnerQueue:
    """Work of sessions, in order for each of them, and one item at a time. All methods belong to the event loop.

    The cost of an item is its number of tokens. While others wait, a session waits for at most one item of each of them
    beyond its equal share (`FairQueue`).
    """

    def __init__(self, submit: Submit) -> None:
        """submit: runs a call in the learner's thread."""
        self._submit, self._queue = submit, FairQueue[Turn]()
        self._turn: Turn | None = None

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return self._queue.length

    def put(self, session: str, cost: float, call: Callable[[], T]) -> asyncio.Task[T]:
        """Queue a call of a session, and return what awaits its result."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queue.put(session, turn, max(1.0, cost))
        task = asyncio.create_task(self._run(turn, call))
        task.add_done_callback(lambda _: self._ended(turn))
        self._next()
        return task

    async def _run(self, turn: Turn, call: Callable[[], T]) -> T:
        await turn
        return await finish(self._submit(call))

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
