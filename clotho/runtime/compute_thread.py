"""The compute thread: the one thread in which MLX ever runs, and how its time is shared.

Three kinds of work take turns:

* **calls** (`submit`): short, run in order of arrival, before anything else: a swap of weights, a new request;
* **steps** (`submit_steps`): long cooperative jobs written as generators, one `next()` per turn: an update, one
  micro-batch at a time; an evaluation, one tick at a time. Several take turns round-robin;
* **ticks** (`attach`): the decode engine, one token for every running row per turn.

Policy: where steps and ticks both have work, the one whose elapsed time is smaller in proportion to its share goes
next (stride scheduling by wall-clock time; ticks own `decode_share`). A side that was idle starts level with the other:
idleness earns no credit. No turn is interrupted, so the longest micro-batch is the longest pause of the API.

The bridge from a thread's future to the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from protocols.errors import ClothoError, ExecutorStoppedError

T = TypeVar("T")


class Ticker(Protocol):
    """What is ticked: the decode engine, seen from the thread that drives it."""

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything."""

    def tick(self) -> int:
        """Advance by one token per row; return the number of tokens sampled."""


class DecodeRates(Struct, frozen=True, kw_only=True):
    """Tokens per second of the attached engine while it had rows: alone, and while the learner had work as well.

    0 where it was never in that situation. Time shared with other steps (an evaluation) counts for neither.
    tokens, seconds: totals of decoding, whatever else was going on.
    """

    idle: float
    learning: float
    tokens: int
    seconds: float


class _NoTicker:
    has_work = False

    def tick(self) -> int:
        return 0


class _Company(Enum):
    """Who else had work while the engine had rows."""

    NONE = auto()
    LEARNER = auto()
    OTHER = auto()


class _Job(NamedTuple):
    """A cooperative job in the round."""

    steps: Generator[None, None, Any]
    future: Future[Any]
    learning: bool


class _Clock:
    """Time used by one side, divided by its share."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.used = 0.0

    def charge(self, seconds: float) -> None:
        self.used += seconds / self.share


class ComputeExecutor:
    """One owned thread, alive from `start` to `stop`. Every public method may be called from any other thread."""

    def __init__(self, *, decode_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """decode_share: share of the thread's time for ticks while steps have work, between 0 and 1, exclusive."""
        self._clock = clock
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._steps: deque[_Job] = deque()
        self._ticker: Ticker = _NoTicker()
        self._broken: Future[None] = Future()
        self._ticks_clock, self._steps_clock = _Clock(decode_share), _Clock(1.0 - decode_share)
        self._contended = False
        self._busy_since = math.inf
        self._stopping = threading.Event()
        self._tokens = dict.fromkeys(_Company, 0)
        self._seconds = dict.fromkeys(_Company, 0.0)
        self._decode_seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=_live, args=([self._serve],), name="compute", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, timeout: float | None = None) -> None:
        """Finish the turn in progress, cancel everything else; the thread does nothing more. Idempotent."""
        self._stopping.set()
        self._calls.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._over.wait(timeout)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in the compute thread between turns; its result, or what it raised, is the future's.

        Raises ExecutorStoppedError if the thread has been stopped.
        """
        if self._stopping.is_set():
            raise ExecutorStoppedError("the compute thread has been stopped")
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def submit_steps(self, steps: Generator[None, None, T], *, learning: bool = False) -> Future[T]:
        """Run a cooperative job, one `next()` per turn; the generator's return value is the result.

        learning: an update, beside which the decode rate is measured on its own. Cancelling the future closes the
        generator at its next turn.
        """
        future: Future[T] = Future()

        def enqueue() -> None:
            if not self._steps:
                self._steps_clock.used = max(self._steps_clock.used, self._ticks_clock.used)
            self._steps.append(_Job(steps, future, learning))

        def give_up(enqueued: Future[None]) -> None:
            if enqueued.cancelled():
                future.cancel()

        self.submit(enqueue).add_done_callback(give_up)
        return future

    def attach(self, ticker: Ticker) -> Future[None]:
        """Give `ticker` turns from now on. The future never has a result; if a tick raises, it has that error.

        A ticker that raised gets no further turns: what it holds is in an unknown state.
        """
        broken: Future[None] = Future()

        def take() -> None:
            self._ticker, self._broken = ticker, broken

        self.submit(take).result()
        return broken

    @property
    def busy_since(self) -> float:
        """When (by `clock`) the turn in progress began; infinity between turns. For watchdogs."""
        return self._busy_since

    def rates(self) -> DecodeRates:
        """Decode rates so far; safe from any thread."""

        def rate(company: _Company) -> float:
            return self._tokens[company] / self._seconds[company] if self._seconds[company] else 0.0

        return DecodeRates(
            idle=rate(_Company.NONE),
            learning=rate(_Company.LEARNER),
            tokens=sum(self._tokens.values()),
            seconds=self._decode_seconds,
        )

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                ready = bool(self._steps) or self._ticker.has_work
                while not self._stopping.is_set() and self._run_call(block=not ready):
                    ready = True
                if self._stopping.is_set():
                    break
                self._turn()
            self._cancel_everything()
        finally:
            self._over.set()

    def _run_call(self, *, block: bool) -> bool:
        """Run one waiting call; False when there is none, or when the thread is to stop."""
        try:
            item = self._calls.get(block=block)
        except queue.Empty:
            return False
        if item is None:
            return False
        call, future = item
        if future.set_running_or_notify_cancel():
            self._timed(lambda: _settle(future, call))
        return True

    def _turn(self) -> None:
        ticks, steps = self._ticker.has_work, bool(self._steps)
        contended = ticks and steps
        if contended and not self._contended:
            level = max(self._ticks_clock.used, self._steps_clock.used)
            self._ticks_clock.used = self._steps_clock.used = level
        self._contended = contended
        company = self._company()
        if ticks and (not steps or self._ticks_clock.used <= self._steps_clock.used):
            seconds = self._timed(self._tick)
            self._ticks_clock.charge(seconds)
            self._decode_seconds += seconds
            self._seconds[company] += seconds
        elif steps:
            seconds = self._timed(self._step)
            self._steps_clock.charge(seconds)
            if contended:
                self._seconds[company] += seconds

    def _company(self) -> _Company:
        if not self._steps:
            return _Company.NONE
        return _Company.LEARNER if any(job.learning for job in self._steps) else _Company.OTHER

    def _tick(self) -> None:
        try:
            self._tokens[self._company()] += self._ticker.tick()
        except Exception as error:
            self._ticker = _NoTicker()
            self._broken.set_exception(error)

    def _step(self) -> None:
        job = self._steps.popleft()
        if job.future.cancelled():
            job.steps.close()
            return
        try:
            next(job.steps)
        except StopIteration as stop:
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(stop.value)
        except BaseException as error:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
        else:
            self._steps.append(job)

    def _timed(self, turn: Callable[[], None]) -> float:
        self._busy_since = begin = self._clock()
        turn()
        self._busy_since = math.inf
        return self._clock() - begin

    def _cancel_everything(self) -> None:
        for job in self._steps:
            job.future.cancel()
            job.steps.close()
        self._steps.clear()
        while True:
            try:
                item = self._calls.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()


def _live(work: list[Callable[[], None]]) -> None:
    """Do the work, let go of it, and then rest for good.

    A thread that has used compiled functions must not end: MLX destroys its cache of them after Python has given the
    thread up for joined, and needs the interpreter for that; if the process is exiting by then, it is aborted.
    """
    work.pop()()
    threading.Event().wait()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


class WorkCancelled(ClothoError, RuntimeError):
    """Work in another thread was cancelled by that thread, not by the one who waits for it."""


async def finish(future: concurrent.futures.Future[T]) -> T:
    """Wait, without blocking the loop, for a future that another thread resolves.

    When the waiting task is cancelled, so is the future: work that has not begun never will; of work that runs, only
    the result is given up. Returns or raises what the work did; WorkCancelled if somebody else cancelled it, since a
    CancelledError would look like the cancellation of the task that waits.
    """
    outcome = asyncio.wrap_future(future)
    try:
        await asyncio.wait([outcome])
    except asyncio.CancelledError:
        outcome.cancel()  # asyncio hands it on to the thread's future
        raise
    if outcome.cancelled():
        raise WorkCancelled("the work was cancelled in its own thread before it had a result")
    return outcome.result()
