"""Calls of reward functions in threads of this process, with time limits: daemon threads, and an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from clotho.lanes.daemon_threads import DaemonThreads, NoThreadError, OvertimeError
from clotho.rewards.values import Completions, Reward, RewardError, Values, await_all, call_all

if TYPE_CHECKING:
    from clotho.lanes.compute_thread import Compute

MAX_HANGING_CALLS = 32
"""Maximum number of abandoned calls of one function that still run. At the limit the function is not called again."""

WAIT_SECONDS = 1.0
"""How long a call waits for a thread, of which there is one for each call that may run."""

T = TypeVar("T")


class Caller:
    """Calls synchronous reward functions on all completions of a group, one after another in one daemon thread.

    One time limit covers all functions on a group.
    """

    def __init__(self, rewards: Sequence[Reward], *, timeout_seconds: float, concurrency: int) -> None:
        """concurrency: number of calls at once, besides those that hang."""
        self.names = tuple(reward.name for reward in rewards)
        self._rewards, self._timeout_seconds = tuple(rewards), timeout_seconds
        limits = {"wait_seconds": WAIT_SECONDS, "work_seconds": timeout_seconds}
        self._threads = DaemonThreads("reward", concurrency + MAX_HANGING_CALLS, **limits)

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value of every function for every completion. Raises RewardError."""
        try:
            return await self._threads.run(lambda: [call_all(reward, completions) for reward in self._rewards])
        except NoThreadError:
            raise _hang(self.names, MAX_HANGING_CALLS) from None
        except OvertimeError:
            raise _took_longer(self.names, self._timeout_seconds) from None


class AsyncCaller:
    """Calls an asynchronous reward function on all completions of a group concurrently, with one time limit."""

    def __init__(self, reward: Reward, *, timeout_seconds: float, loop: WorkerLoop) -> None:
        self.names: tuple[str, ...] = (reward.name,)
        self._reward, self._timeout_seconds, self._loop = reward, timeout_seconds, loop
        self._hanging: list[Future[list[Values] | None]] = []

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value of the function for every completion. Raises RewardError."""
        self._hanging = [call for call in self._hanging if not call.done()]
        if len(self._hanging) >= MAX_HANGING_CALLS:
            raise _hang(self.names, len(self._hanging))
        call = self._loop.start(self._await_all(completions))
        ended = asyncio.wrap_future(call)
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # a late failure has no receiver
        try:
            await asyncio.wait({ended}, timeout=self._timeout_seconds)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if not ended.done():
            self._hanging.append(call)
        elif (values := ended.result()) is not None:
            return values
        raise _took_longer(self.names, self._timeout_seconds)

    async def _await_all(self, completions: Completions) -> list[Values] | None:
        """Await the values in the loop of the calls; None at the time limit, if the function can be cancelled."""
        with anyio.move_on_after(self._timeout_seconds):
            return [await await_all(self._reward, completions)]
        return None


def _hang(names: Sequence[str], count: int) -> RewardError:
    return RewardError(f"reward {', '.join(names)} was not called: {count} earlier calls still hang")


def _took_longer(names: Sequence[str], seconds: float) -> RewardError:
    return RewardError(f"reward {', '.join(names)} took longer than {seconds:g} s")


class ModelReward(Protocol):
    """Scores groups with a model of its own."""

    async def begin(self, compute: Compute) -> None:
        """Load the model in a compute thread. Raises ModelError."""

    async def score(self, completions: Completions) -> Values:
        """Return the value of each completion of a group. Raises RewardError."""


class ModelCaller:
    """Lets a model score groups, each with a time limit."""

    def __init__(self, name: str, model: ModelReward, *, timeout_seconds: float) -> None:
        self.names: tuple[str, ...] = (name,)
        self._model, self._timeout_seconds = model, timeout_seconds

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value for every completion. Raises RewardError."""
        with anyio.move_on_after(self._timeout_seconds):
            return [await self._model.score(completions)]
        raise _took_longer(self.names, self._timeout_seconds)


class WorkerLoop:
    """An event loop for asynchronous calls, in a daemon thread that starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the event loop of the thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="reward-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Cancel the running calls and end the thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


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
