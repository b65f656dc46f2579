"""One learner thread for all models: its work is taken fairly from the sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from clotho.lanes.fair_queue import FairQueue
from clotho.lanes.sampling_client import Submit
from protocols.errors import ExecutorStoppedError

T = TypeVar("T")


class _Work(NamedTuple):
    call: Callable[[], Any]
    done: asyncio.Future[Any]


class LearnerQueue:
    """Work of sessions, in order for each of them, and one item at a time. All methods belong to the event loop.

    The cost of an item is its number of tokens. While others wait, a session waits for at most one item of each of them
    beyond its equal share (`FairQueue`).
    """

    def __init__(self, submit: Submit) -> None:
        """submit: runs a call in the learner's thread."""
        self._submit, self._queue = submit, FairQueue[_Work]()
        self._running = False

    @property
    def waiting(self) -> int:
        """Number of items that wait."""
        return self._queue.length

    def put(self, session: str, cost: float, call: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a call of a session, and return its future."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.put(session, _Work(call, done), max(1.0, cost))
        self._next()
        return done

    def _next(self) -> None:
        work, loop = None, asyncio.get_running_loop()
        while not self._running and self._queue.length and (work is None or work.done.done()):
            work = self._queue.take()  # what nobody waits for any more is left out
        if work is None or work.done.done():
            return
        try:
            future = self._submit(work.call)
        except ExecutorStoppedError:  # the server ends
            work.done.cancel()
            return
        self._running = True
        future.add_done_callback(partial(self._report, loop, work))

    def _report(self, loop: asyncio.AbstractEventLoop, work: _Work, ended: Future[Any]) -> None:
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(self._ended, work, ended)

    def _ended(self, work: _Work, ended: Future[Any]) -> None:
        self._running = False
        if not work.done.done():
            if ended.cancelled() or isinstance(error := ended.exception(), ExecutorStoppedError):
                work.done.cancel()
            elif error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(ended.result())
        self._next()
