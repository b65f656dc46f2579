"""The compute thread: the only thread that runs MLX, and the scheduling of its time.

Three kinds of work take turns:

* **calls** (`submit`): short functions such as a weight swap or a new request. They run in order of arrival, before
  any other work;
* **jobs** (`submit_steps`): long cooperative computations, written as generators. A turn is one `next()`: one
  part of a micro-batch, for example. Several jobs take turns round-robin;
* **decode steps** (`attach`): a turn samples one token for every running sequence.

If jobs and the decode engine both have work, the next turn belongs to the side that has used less time in proportion
to its share (stride scheduling by wall-clock time). `decode_share` is the share of decoding. A side that was idle gets
no credit for the idle time. While a client waits for a first token, decode steps come first; jobs get this time back,
and it is limited to `URGENT_SECONDS`. Turns are not interrupted, so the longest turn is the longest pause of the HTTP
API.

`finish` waits in the event loop for a future of the compute thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from msgspec import Struct

from protocols.errors import ClothoError, ExecutorStoppedError, as_exception
from protocols.summary import Distribution

T = TypeVar("T")

JobKind = Literal["update", "swap", "parity", "evaluation", "scoring"]
TurnKind = Literal["call", "decode"] | JobKind
"""What a turn computes. Jobs: an update of the learner, a weight swap, a parity check, an evaluation, or the scoring of
given tokens."""

URGENT_SECONDS = 1.0
"""Largest time that jobs may be owed for urgent decode steps."""

KINDS: tuple[TurnKind, ...] = ("call", "decode", *get_args(JobKind))
TURN_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of durations of turns."""


class TurnTimes(Struct, frozen=True, kw_only=True):
    """Durations of the turns of one kind, in seconds. longest: the longest one since the start."""

    seconds: Distribution
    longest: float


class _TurnClock:
    """Counts the turns of one kind by duration."""

    def __init__(self) -> None:
        self._counts = [0] * (len(TURN_SECONDS) + 1)
        self._total = self._longest = 0.0

    def add(self, seconds: float) -> None:
        """Count a turn."""
        self._counts[bisect_left(TURN_SECONDS, seconds)] += 1
        self._total += seconds
        self._longest = max(self._longest, seconds)

    def times(self) -> TurnTimes:
        """Return the durations so far. Thread-safe."""
        seconds = Distribution(bounds=TURN_SECONDS, counts=tuple(self._counts), total=self._total)
        return TurnTimes(seconds=seconds, longest=self._longest)


class Ticker(Protocol):
    """The decode engine, as the compute thread sees it."""

    @property
    def has_work(self) -> bool:
        """Whether a decode step has anything to do."""

    @property
    def is_urgent(self) -> bool:
        """Whether a client waits for a first token."""

    def tick(self) -> int:
        """Run one decode step and return the number of sampled tokens."""


class DecodeRates(Struct, frozen=True, kw_only=True):
    """Decode rates of the attached engine, in tokens per second; 0 if not measured.

    idle: while no job had work. learning: while the learner had work. Neither includes time that was shared with other
    jobs, such as an evaluation. share: fraction of the time of `learning` that decoding took; 0 if not measured.
    tokens, seconds: totals of decoding, under any load.
    """

    idle: float
    learning: float
    share: float
    tokens: int
    seconds: float


class _NoTicker:
    """The ticker without an engine."""

    has_work = is_urgent = False

    def tick(self) -> int:
        return 0


class _Company(Enum):
    """The job that had work while the engine decoded."""

    NONE = auto()
    LEARNER = auto()
    OTHER = auto()


class _Job(NamedTuple):
    """A cooperative job."""

    steps: Generator[None, None, Any]
    future: Future[Any]
    kind: JobKind


class _Clock:
    """Time used by one side, divided by its share."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.used = 0.0

    def charge(self, seconds: float) -> None:
        """Add the time of one turn."""
        self.used += seconds / self.share


class ComputeExecutor:
    """Owns the compute thread from `start` to `stop`. Public methods are thread-safe."""

    def __init__(self, *, decode_share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """decode_share: fraction of the time for decode steps while jobs have work, between 0 and 1, exclusive."""
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
        self._decode_seconds = self._learning_decode_seconds = 0.0
        self._turns = {kind: _TurnClock() for kind in KINDS}
        self._longest_learner_turn = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=_live, args=([self._serve],), name="compute", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, timeout: float | None = None) -> bool:
        """Finish the current turn and cancel all other work. Calling it again has no effect.

        Returns False if the current turn takes longer than `timeout` seconds.
        """
        self._stopping.set()
        self._calls.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            return self._over.wait(timeout)
        return True

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in the compute thread between turns. The future gets its result or its exception.

        Raises ExecutorStoppedError if the thread was stopped.
        """
        if self._stopping.is_set():
            raise ExecutorStoppedError("the compute thread was stopped")
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def submit_steps(self, steps: Generator[None, None, T], *, kind: JobKind) -> Future[T]:
        """Run a cooperative job, one `next()` per turn. The return value of the generator is the future's result.

        kind: durations of turns are measured by kind, and decode rates separately beside updates. Cancelling the future
        closes the generator at its next turn.
        """
        future: Future[T] = Future()

        def enqueue() -> None:
            if not self._steps:
                self._steps_clock.used = max(self._steps_clock.used, self._ticks_clock.used)
            self._steps.append(_Job(steps, future, kind))

        def give_up(enqueued: Future[None]) -> None:
            if enqueued.cancelled():
                future.cancel()

        self.submit(enqueue).add_done_callback(give_up)
        return future

    def attach(self, ticker: Ticker) -> Future[None]:
        """Run the decode steps of `ticker` from now on. The future never gets a result, only an exception.

        If a decode step raises, the future gets the exception and `ticker` runs no more, because its state is unknown.
        """
        broken: Future[None] = Future()

        def take() -> None:
            self._ticker, self._broken = ticker, broken

        self.submit(take).result()
        return broken

    @property
    def busy_since(self) -> float:
        """Start time of the current turn, in seconds of `clock`; math.inf between turns. For watchdogs."""
        return self._busy_since

    def rates(self) -> DecodeRates:
        """Return the decode rates so far. Thread-safe."""

        def rate(company: _Company) -> float:
            return self._tokens[company] / self._seconds[company] if self._seconds[company] else 0.0

        return DecodeRates(
            idle=rate(_Company.NONE),
            learning=rate(_Company.LEARNER),
            share=self._learning_decode_seconds / (self._seconds[_Company.LEARNER] or 1.0),
            tokens=sum(self._tokens.values()),
            seconds=self._decode_seconds,
        )

    def turn_times(self) -> dict[TurnKind, TurnTimes]:
        """Return the durations of turns by kind, of all kinds. Thread-safe."""
        return {kind: clock.times() for kind, clock in self._turns.items()}

    def take_longest_learner_turn(self) -> float:
        """Return the duration in seconds of the longest turn of a learner's job since the last call. Thread-safe."""
        longest, self._longest_learner_turn = self._longest_learner_turn, 0.0
        return longest

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
        """Run one waiting call. Returns False if none waits or if the thread must stop."""
        try:
            item = self._calls.get(block=block)
        except queue.Empty:
            return False
        if item is None:
            return False
        call, future = item
        if future.set_running_or_notify_cancel():
            self._timed(lambda: _settle(future, call), "call")
        return True

    def _turn(self) -> None:
        ticks, steps = self._ticker.has_work, bool(self._steps)
        contended = ticks and steps
        if contended and not self._contended:
            level = max(self._ticks_clock.used, self._steps_clock.used)
            self._ticks_clock.used = self._steps_clock.used = level
        self._contended = contended
        company = self._company()
        if ticks and (not steps or self._decoding_is_next()):
            seconds = self._timed(self._tick, "decode")
            self._ticks_clock.charge(seconds)
            self._decode_seconds += seconds
            self._seconds[company] += seconds
            self._learning_decode_seconds += seconds if company is _Company.LEARNER else 0.0
        elif steps:
            kind = self._steps[0].kind
            seconds = self._timed(self._step, kind)
            if kind == "update":
                self._longest_learner_turn = max(self._longest_learner_turn, seconds)
            self._steps_clock.charge(seconds)
            if contended:
                self._seconds[company] += seconds

    def _decoding_is_next(self) -> bool:
        """Whether decoding has used less of its share, or is urgent and has not used much more."""
        ahead = (self._ticks_clock.used - self._steps_clock.used) * self._steps_clock.share
        return ahead <= 0.0 or (self._ticker.is_urgent and ahead < URGENT_SECONDS)

    def _company(self) -> _Company:
        if not self._steps:
            return _Company.NONE
        return _Company.LEARNER if any(job.kind == "update" for job in self._steps) else _Company.OTHER

    def _tick(self) -> None:
        try:
            self._tokens[self._company()] += self._ticker.tick()
        except BaseException as error:
            self._ticker = _NoTicker()
            self._broken.set_exception(as_exception(error))

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
                job.future.set_exception(as_exception(error))
        else:
            self._steps.append(job)

    def _timed(self, turn: Callable[[], None], kind: TurnKind) -> float:
        self._busy_since = begin = self._clock()
        turn()
        self._busy_since = math.inf
        seconds = self._clock() - begin
        self._turns[kind].add(seconds)
        return seconds

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
    """Do the work, release it, and then block forever.

    A thread that has used compiled functions must not end. MLX destroys the thread's cache of compiled functions after
    Python considers the thread joined, and needs the interpreter to do so; a process that exits meanwhile is aborted.
    """
    work.pop()()
    threading.Event().wait()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(as_exception(error))


class WorkCancelled(ClothoError, RuntimeError):
    """Work in another thread was cancelled there, and not by the waiting task."""


async def finish(future: concurrent.futures.Future[T]) -> T:
    """Wait in the event loop for a future of another thread, and return its result or raise its exception.

    If the waiting task is cancelled, the future is cancelled too: work that has not started never starts, and the
    result of running work is discarded. Raises WorkCancelled if the future was cancelled elsewhere, because a
    CancelledError would look like the cancellation of the waiting task.
    """
    outcome = asyncio.wrap_future(future)
    try:
        await asyncio.wait([outcome])
    except asyncio.CancelledError:
        outcome.cancel()  # asyncio also cancels the thread's future
        raise
    if outcome.cancelled():
        raise WorkCancelled("the work was cancelled in its own thread")
    return outcome.result()
