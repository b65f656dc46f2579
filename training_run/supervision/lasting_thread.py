"""A thread that is never interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class LastingThread:
    """Runs one function after the other in a daemon thread, which lives as long as the process, and is not interrupted.

    For what belongs to the thread that began it, such as a group of processes.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a function after those that were submitted before; return its future."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of a function, or raise its exception. Cancellation does not interrupt it."""
        return await asyncio.wrap_future(self.submit(call))

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
