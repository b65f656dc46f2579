"""Runs synchronous functions in daemon threads. A function that runs for too long is interrupted, and delays no exit.

The interpreter joins the threads of the standard library's pools and of anyio at exit, so that one long call would keep
the process alive. Daemon threads are not joined.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

import anyio

from protocols.errors import as_exception

T = TypeVar("T")

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
"""Time between two interrupts of the same call; it doubles each time."""


class NoThreadError(Exception):
    """No thread became free in time."""


class OvertimeError(Exception):
    """The function took longer than its time limit."""


class _Interrupted(BaseException):
    """Raised in the thread of an abandoned call. Takes effect at the next Python bytecode, not inside a C call."""


class DaemonThreads:
    """At most `limit` functions run at once, each in a daemon thread of its own. Used from one event loop.

    A function waits at most `wait_seconds` for a free thread and runs at most `work_seconds`. The thread of an
    interrupted function counts towards `limit` until it has ended. Both times can be math.inf.
    """

    def __init__(self, name: str, limit: int, *, wait_seconds: float, work_seconds: float) -> None:
        self._name, self._free = name, anyio.Semaphore(limit)
        self._wait_seconds, self._work_seconds = wait_seconds, work_seconds

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its exception as `as_exception` does. Cancellation interrupts `work`.

        Raises NoThreadError if no thread became free, and OvertimeError if `work` exceeded its time limit.
        """
        try:
            with anyio.fail_after(self._wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            raise NoThreadError from None
        call = _Call(work, asyncio.get_running_loop(), self._free.release)
        thread = threading.Thread(target=call.run, name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._free.release()
            raise
        try:
            async with asyncio.timeout(self._work_seconds):
                return await call.outcome
        except TimeoutError:
            if call.outcome.done() and not call.outcome.cancelled():
                raise  # `work` itself raised TimeoutError
            raise OvertimeError from None
        finally:
            call.interrupt(thread)


class _Call(Generic[T]):
    """One call. `run` executes in the thread; the other methods in the event loop.

    The thread takes `_left` when it has left the work, and never releases it: after that, nothing interrupts it.
    """

    def __init__(self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        self.outcome: asyncio.Future[T] = loop.create_future()
        self._work, self._loop, self._on_end = work, loop, ended
        self._left = threading.RLock()
        self._interrupts, self._retry_seconds = 0, FIRST_RETRY_SECONDS
        self._settled = False

    def run(self) -> None:
        result: T | None = None
        error: Exception | None = None
        with suppress(_Interrupted):
            try:
                result = self._work()
            except _Interrupted:
                raise
            except BaseException as raised:
                error = as_exception(raised)
            self._leave()
        self._leave()
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _leave(self) -> None:
        """Refuse further interrupts, and let one be raised that has not been raised yet."""
        with suppress(_Interrupted):
            self._left.acquire()
            if self._interrupts:
                for _ in range(100):  # CPython raises it at one of the next bytecodes
                    time.sleep(0)

    def _settle(self, result: T | None, error: Exception | None) -> None:
        if self._settled:
            return
        self._settled = True
        self._on_end()
        if self.outcome.done():
            return
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(cast(T, result))

    def interrupt(self, thread: threading.Thread) -> None:
        """Interrupt the work, and repeat that until the thread has left the work.

        Python drops an exception that is raised inside a finalizer or a callback of a weak reference, and the work can
        catch it.
        """
        if not self._left.acquire(blocking=False):
            return
        try:
            if not thread.is_alive():  # an interrupt ended the thread before it could report its end
                self._settle(None, None)
                return
            self._interrupts += 1
            raised = ctypes.py_object(_Interrupted)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), raised)
        finally:
            self._left.release()
        self._loop.call_later(self._retry_seconds, self.interrupt, thread)
        self._retry_seconds = min(2.0 * self._retry_seconds, MAX_RETRY_SECONDS)
