"""Where synchronous rewards run: threads that are reused, can be given up, and never keep the process alive.

Where asynchronous rewards run: an event loop of their own, in a thread that never keeps the process alive.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Call(Protocol[T]):
    """One call under way."""

    @property
    def future(self) -> Future[T]:
        """The result to come; none comes of an abandoned call."""

    @property
    def alive(self) -> bool:
        """Whether the call still runs."""

    def abandon(self) -> None:
        """Give it up, and stop it where that is possible."""


class Interrupted(BaseException):
    """Raised inside an abandoned thread, so that a loop in Python ends; a call in C ends first."""


class WorkerThreads:
    """Daemon threads for synchronous work, as many as there are calls at once.

    The pools of the standard library and of anyio are joined when the interpreter exits, so one hanging call would keep
    the process; these are not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def start(self, work: Callable[[], T]) -> Call[T]:
        """Run the work in an idle thread or a new one, at once."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        call = _ThreadCall(self, worker, work)
        worker.inbox.put(call)
        return call

    def close(self) -> None:
        """End the idle threads; the others end with their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.inbox.put(None)

    def finished(self, worker: _Worker, call: _ThreadCall[Any]) -> bool:
        """Say, in the worker's thread, whether it should wait for more work."""
        with self._lock:
            call.ended = True
            if call.abandoned or self._closed:
                return False
            self._idle.append(worker)
            return True

    def abandon(self, worker: _Worker, call: _ThreadCall[Any]) -> None:
        """Give up a call: its thread is interrupted where that is possible, and never used again."""
        with self._lock:
            if call.ended or call.abandoned:
                return
            call.abandoned = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Interrupted))


class _ThreadCall(Generic[T]):
    def __init__(self, threads: WorkerThreads, worker: _Worker, work: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self.work = work
        self.ended = False
        self.abandoned = False
        self._threads = threads
        self._worker = worker

    @property
    def alive(self) -> bool:
        return not self.ended and self._worker.is_alive()

    def abandon(self) -> None:
        self._threads.abandon(self._worker, self)


class _Worker(threading.Thread):
    def __init__(self, threads: WorkerThreads) -> None:
        super().__init__(name="reward", daemon=True)
        self.inbox: SimpleQueue[_ThreadCall[Any] | None] = SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        try:
            while (call := self.inbox.get()) is not None:
                _settle(call.future, call.work)
                if not self._threads.finished(self, call):
                    return
        except Interrupted:
            return  # nobody waits for the result of an abandoned call


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except Interrupted:
        raise
    except BaseException as error:  # a reward that raises SystemExit ends its own call, not the thread
        future.set_exception(error)
    else:
        future.set_result(result)


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
