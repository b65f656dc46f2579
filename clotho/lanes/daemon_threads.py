"""Runs synchronous functions in daemon threads. A function that runs for too long is interrupted, and delays no exit.

The interpreter joins the threads of the standard library's pools and of anyio at exit, so that one long call would keep
the process alive. Daemon threads are not joined.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import anyio

from protocols.errors import Interrupted, as_exception

T = TypeVar("T")

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
"""Time between two interrupts of the same call; it doubles each time."""


class NoThreadError(Exception):
    """No thread became free in time."""


class OvertimeError(Exception):
    """The function took longer than its time limit."""


class DaemonThreads:
    """At most `limit` functions run at once, each in a daemon thread. Used from one event loop.

    A thread starts when a function finds no idle thread, and then waits for further functions, because the start of a
    thread blocks the event loop until another thread releases the interpreter lock. A function waits at most
    `wait_seconds` for a free thread and runs at most `work_seconds`. The thread of an interrupted function counts
    towards `limit` until the function has ended, and runs no further function. Both times can be math.inf.
    """

    def __init__(self, name: str, limit: int, *, wait_seconds: float, work_seconds: float) -> None:
        self._name, self._free = name, anyio.Semaphore(limit)
        self._wait_seconds, self._work_seconds = wait_seconds, work_seconds
        self._idle: list[_Worker] = []
        weakref.finalize(self, _dismiss, self._idle)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its exception as `as_exception` does. Cancellation interrupts `work`.

        Raises NoThreadError if no thread became free, and OvertimeError if `work` exceeded its time limit.
        """
        try:
            with anyio.fail_after(self._wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise NoThreadError from None
        try:
            worker = self._idle.pop() if self._idle else _Worker(self._name)
        except BaseException:
            self._free.release()
            raise
        call = _Call(work, asyncio.get_running_loop(), partial(self._ended, worker))
        worker.calls.put(call)
        try:
            async with asyncio.timeout(self._work_seconds):
                return await call.outcome
        except TimeoutError:
            if call.outcome.done() and not call.outcome.cancelled():
                raise  # `work` itself raised TimeoutError
            raise OvertimeError from None
        finally:
            call.interrupt(worker.thread)

    def _ended(self, worker: _Worker, is_interrupted: bool) -> None:
        if not is_interrupted:
            self._idle.append(worker)
        self._free.release()


class _Worker:
    """A thread that runs one call after the other. None ends it."""

    def __init__(self, name: str) -> None:
        self.calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self.calls,), name=name, daemon=True)
        self.thread.start()


def _serve(calls: SimpleQueue[_Call[Any] | None]) -> None:
    with suppress(Interrupted):  # ends the thread; the next attempt to interrupt its call notices that
        while (call := calls.get()) is not None and call.run():
            del call  # an idle thread holds no result


def _dismiss(idle: list[_Worker]) -> None:
    """End the idle threads of a pool that is no longer used."""
    for worker in idle:
        worker.calls.put(None)


class _Call(Generic[T]):
    """One call. `run` executes in the thread; the other methods in the event loop.

    The thread takes `_left` when it has left the work, and never releases it: after that, nothing interrupts it.
    """

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, on_end: Callable[[bool], None]) -> None:
        """on_end: called in the event loop when the call has left its thread, with whether it was interrupted."""
        self.outcome: asyncio.Future[T] = loop.create_future()
        self._work, self._loop, self._on_end = work, loop, on_end
        self._left = threading.RLock()
        self._interrupts, self._retry_seconds = 0, FIRST_RETRY_SECONDS
        self._has_begun = self._is_abandoned = self._is_set = False

    def run(self) -> bool:
        """Run the work; return whether the thread can run further calls."""
        result: T | None = None
        error: Exception | None = None
        with suppress(Interrupted):
            self._has_begun = True
            try:
                if not self._is_abandoned:
                    result = self._work()
            except Interrupted:
                raise
            except BaseException as raised:
                error = as_exception(raised)
            self._leave()
        self._leave()
        try:
            self._loop.call_soon_threadsafe(self._set_outcome, result, error)
        except RuntimeError:  # the event loop is closed
            return False
        return not self._interrupts

    def _leave(self) -> None:
        """Refuse further interrupts, and let one be raised that has not been raised yet."""
        with suppress(Interrupted):
            self._left.acquire()
            if self._interrupts:
                for _ in range(100):  # CPython raises it at one of the next bytecodes
                    time.sleep(0)

    def _set_outcome(self, result: T | None, error: Exception | None) -> None:
        if self._is_set:
            return
        self._is_set = True
        self._on_end(self._interrupts > 0)
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(cast(T, result))

    def interrupt(self, thread: threading.Thread) -> None:
        """Interrupt the work, and repeat that until the thread has left the work.

        Python drops an exception that is raised inside a finalizer or a callback of a weak reference, and the work can
        catch it. Work that has not begun yet is not interrupted: it does not begin.
        """
        if not self._left.acquire(blocking=False):
            return
        try:
            if not thread.is_alive():  # an interrupt ended the thread before it could report its end
                self._set_outcome(None, None)
                return
            self._is_abandoned = True
            if self._has_begun:
                self._interrupts += 1
                raised = ctypes.py_object(Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)
        finally:
            self._left.release()
        self._loop.call_later(self._retry_seconds, self.interrupt, thread)
        self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
