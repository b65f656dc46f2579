"""Where asynchronous rewards run: an event loop of their own, in a thread that never keeps the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from clotho.rewards.workers import Call

T = TypeVar("T")


class WorkerLoop:
    """One daemon thread with an event loop for asynchronous work, started with its first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Call[T]:
        """Run the coroutine in the thread's event loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="reward-loop", daemon=True).start()
        call = _LoopCall[T](self._loop)
        self._loop.call_soon_threadsafe(call.begin, work)
        return call

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _LoopCall(Generic[T]):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False

    @property
    def alive(self) -> bool:
        return not self._loop.is_closed() and (self._task is None or not self._task.done())

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._task = self._loop.create_task(self._run(work))
        if self._abandoned:
            self._task.cancel()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop, and with it every other call
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def abandon(self) -> None:
        self._abandoned = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
