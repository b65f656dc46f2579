"""Calls of reward functions in threads of this process: worker threads, an event loop, time limits."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import anyio

from clotho.rewards.values import Completions, Interrupted, Reward, RewardError, Values, await_all, call_all

MAX_HANGING_CALLS = 32
"""Maximum number of abandoned calls of one function that still run. At the limit the function is not called again."""

T = TypeVar("T")


class Caller:
    """Calls reward functions on all completions of a group, with one time limit per group.

    Without `loop`, the functions are synchronous and run one after another in one worker thread. With `loop`, there is
    exactly one function; it is asynchronous, and its calls for all completions run concurrently.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        timeout_seconds: float,
        threads: WorkerThreads,
        loop: WorkerLoop | None = None,
    ) -> None:
        self.names = tuple(reward.name for reward in rewards)
        self._rewards = tuple(rewards)
        self._timeout_seconds = timeout_seconds
        self._threads = threads
        self._loop = loop
        self._hanging: list[RunningCall[list[Values]]] = []

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value of every function for every completion. Raises RewardError."""
        names = ", ".join(self.names)
        self._hanging = [call for call in self._hanging if call.alive]
        for call in self._hanging if self._loop is None else ():
            call.abandon()  # again: Python drops an interrupt that is raised inside a finalizer
        if len(self._hanging) >= MAX_HANGING_CALLS:
            raise RewardError(f"reward {names} was not called: {len(self._hanging)} earlier calls still hang")
        call = self._start(completions)
        try:
            with anyio.fail_after(self._timeout_seconds):
                return await asyncio.wrap_future(call.future)
        except TimeoutError:
            self._hanging.append(call)
            raise RewardError(f"reward {names} took longer than {self._timeout_seconds:g} s") from None
        finally:
            if not call.future.done():
                call.abandon()

    def _start(self, completions: Completions) -> RunningCall[list[Values]]:
        if self._loop is not None:
            return self._loop.start(lambda: _await_one(self._rewards[0], completions))
        return self._threads.start(lambda: [call_all(reward, completions) for reward in self._rewards])


async def _await_one(reward: Reward, completions: Completions) -> list[Values]:
    return [await await_all(reward, completions)]


class RunningCall(Protocol[T]):
    """A running call."""

    @property
    def future(self) -> Future[T]:
        """The result. An abandoned call sets no result."""

    @property
    def alive(self) -> bool:
        """Whether the call still runs."""

    def abandon(self) -> None:
        """Abandon the call, and interrupt it if possible."""


class WorkerThreads:
    """Reusable daemon threads for synchronous calls, one per concurrent call.

    The interpreter joins the threads of the standard library's pools and of anyio at exit, so that one hanging call
    would keep the process alive. Daemon threads are not joined.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def start(self, work: Callable[[], T]) -> RunningCall[T]:
        """Start the work immediately, in an idle thread or a new one."""
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = _Worker(self)
            worker.start()
        call = _ThreadCall(self, worker, work)
        worker.inbox.put(call)
        return call

    def close(self) -> None:
        """End the idle threads. Busy threads end after their call."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.inbox.put(None)

    def finished(self, worker: _Worker, call: _ThreadCall[Any]) -> bool:
        """Mark a call as ended, from the worker thread. Return whether the worker should wait for more work."""
        with self._lock:
            call.ended = True
            if call.abandoned or self._closed:
                return False
            self._idle.append(worker)
            return True

    def abandon(self, worker: _Worker, call: _ThreadCall[Any]) -> None:
        """Abandon a call. Its thread is interrupted if possible, and is not used again."""
        with self._lock:
            if not call.alive:
                return
            call.abandoned = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Interrupted))


class _ThreadCall(Generic[T]):
    """A call in a worker thread. ended, abandoned: under the lock of `WorkerThreads`."""

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
        """Whether the thread still computes the call."""
        return not self.ended and self._worker.is_alive()

    def abandon(self) -> None:
        """Interrupt the call. Its result has no receiver."""
        self._threads.abandon(self._worker, self)


class _Worker(threading.Thread):
    """A thread that computes one call after another, until it receives None or a call is abandoned."""

    def __init__(self, threads: WorkerThreads) -> None:
        super().__init__(name="reward", daemon=True)
        self.inbox: SimpleQueue[_ThreadCall[Any] | None] = SimpleQueue()
        self._threads = threads

    def run(self) -> None:
        try:
            while (call := self.inbox.get()) is not None:
                _set_result(call.future, call.work)
                if not self._threads.finished(self, call):
                    return
        except Interrupted:
            return  # an abandoned call has no receiver


def _set_result(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except Interrupted:
        raise
    except BaseException as error:  # SystemExit ends the call, not the thread
        future.set_exception(error)
    else:
        future.set_result(result)


class WorkerLoop:
    """An event loop for asynchronous calls, in a daemon thread that starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> RunningCall[T]:
        """Start the coroutine in the event loop of the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="reward-loop", daemon=True).start()
        call = _LoopCall[T](self._loop)
        self._loop.call_soon_threadsafe(call.begin, work)
        return call

    def close(self) -> None:
        """Cancel the running calls and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class _LoopCall(Generic[T]):
    """A call in the event loop of a `WorkerLoop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._abandoned = False

    @property
    def alive(self) -> bool:
        """Whether the call has not ended."""
        return not self._loop.is_closed() and (self._task is None or not self._task.done())

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        """Start the coroutine. Called in the event loop."""
        self._task = self._loop.create_task(self._run(work))
        if self._abandoned:
            self._task.cancel()

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop and all other calls
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def abandon(self) -> None:
        """Cancel the call. Its result has no receiver."""
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
