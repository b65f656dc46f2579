"""Compute threads: each runs calls one after the other, and the decode thread also the steps of the engine.

MLX computes in the thread that builds a graph: an array that is not evaluated belongs to its thread, so what goes from
one thread to another is evaluated. `Compute` has a thread for decoding, one for the learner, and one each for
evaluations, for parity checks and for the scoring of prompts; the arbiter decides which of them compute at once.

`finish` waits in the event loop for a future of a compute thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeVar, get_args

from msgspec import Struct

from clotho.lanes.arbiter import Arbiter, Lane, TurnKind, WorkCancelled, WorkKind
from protocols.errors import ExecutorStoppedError, as_exception

T = TypeVar("T")

SWITCH_SECONDS = 0.0005
"""How long a thread keeps the interpreter while another waits: 10 % more steps of a small policy than with 0.005."""


class Ticker(Protocol):
    """The decode engine, as the decode thread sees it."""

    @property
    def has_work(self) -> bool:
        """Whether a decode step has anything to do."""

    @property
    def is_urgent(self) -> bool:
        """Whether a client waits for a first token."""

    @property
    def long_only(self) -> bool:
        """Whether only long requests of clients are decoded, which others need not wait for."""

    def tick(self) -> int:
        """Run one decode step and return the number of sampled tokens."""


class DecodeRates(Struct, frozen=True, kw_only=True):
    """Decode rates of the attached engine, in tokens per second; 0 if not measured.

    idle: while nothing else had work. learning: while the learner had work. Neither includes time that was shared with
    other work, such as an evaluation. share: fraction of the time of `learning` that decode steps took; 0 if not
    measured. tokens, seconds: totals of decode steps, under any load.
    """

    idle: float
    learning: float
    share: float
    tokens: int
    seconds: float


Beside = Literal["nothing", "learner", "other"]
"""Who else had work while the engine decoded."""


class _DecodeClock:
    """Measures decode rates. Waiting for a turn counts, if the engine had work since its last step."""

    def __init__(self, arbiter: Arbiter) -> None:
        self._arbiter = arbiter
        self._tokens: dict[Beside, int] = dict.fromkeys(get_args(Beside), 0)
        self._seconds: dict[Beside, float] = dict.fromkeys(get_args(Beside), 0.0)
        self._decode_seconds = self._learning_decode_seconds = 0.0
        self._since: float | None = None

    def begin(self) -> Beside:
        """Record that a step waits for its turn. Return what computes beside it, which it is counted with."""
        if self._since is None:
            self._since = self._arbiter.clock()
        if not self._arbiter.others_work:
            return "nothing"
        return "learner" if self._arbiter.works("update") else "other"

    def end(self, beside: Beside, tokens: int, seconds: float) -> None:
        """Record a step that took `seconds`."""
        now, since = self._arbiter.clock(), self._since
        assert since is not None
        self._tokens[beside] += tokens
        self._seconds[beside] += now - since
        self._decode_seconds += seconds
        self._learning_decode_seconds += seconds if beside == "learner" else 0.0
        self._since = now

    def idle(self) -> None:
        """Record that the engine has no work."""
        self._since = None

    def rates(self) -> DecodeRates:
        """Return the rates so far. Thread-safe."""

        def rate(beside: Beside) -> float:
            return self._tokens[beside] / self._seconds[beside] if self._seconds[beside] else 0.0

        return DecodeRates(
            idle=rate("nothing"),
            learning=rate("learner"),
            share=self._learning_decode_seconds / (self._seconds["learner"] or 1.0),
            tokens=sum(self._tokens.values()),
            seconds=self._decode_seconds,
        )


class _Call(Future[T]):
    """A future whose cancellation is seen by a call that runs."""

    abandoned = False

    def cancel(self) -> bool:
        """Cancel the call; one that runs ends at its next pause."""
        self.abandoned = True
        return super().cancel()


class _NoTicker:
    """The ticker without an engine."""

    has_work = is_urgent = long_only = False

    def tick(self) -> int:
        """Do nothing."""
        return 0


class ComputeThread:
    """A thread that computes from `start` to `stop`. Public methods are thread-safe."""

    def __init__(self, lane: Lane, arbiter: Arbiter, kind: TurnKind = "call") -> None:
        """kind: of the turns of calls."""
        self.lane, self._arbiter, self._kind = lane, arbiter, kind
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], _Call[Any]] | None] = queue.SimpleQueue()
        self._ticker: Ticker = _NoTicker()
        self._broken: Future[None] = Future()
        self._clock = _DecodeClock(arbiter)
        self._stopping, self._ended, self._over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=_run_and_block, args=([self._serve],), name=f"compute {lane.name}", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no more work. Running work ends at its next pause."""
        self._stopping.set()
        self._calls.put(None)

    def stopped(self, timeout: float | None) -> bool:
        """Wait until the thread has ended its work; False if that takes longer than `timeout` seconds."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return True
        return self._over.wait(timeout)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` here before further steps; cancelling ends it at its next pause. Raises ExecutorStoppedError."""
        if self._stopping.is_set():
            raise ExecutorStoppedError("the compute thread was stopped")
        future: _Call[T] = _Call()
        self._calls.put((call, future))
        if self._ended.is_set():  # it ended after the check above, and may have cancelled the waiting calls before
            self._cancel_waiting()
        return future

    def attach(self, ticker: Ticker) -> Future[None]:
        """Run the steps of `ticker` from now on. The future never gets a result, only an exception.

        If a step raises, the future gets the exception and `ticker` runs no more, because its state is unknown.
        """
        broken: Future[None] = Future()

        def take() -> None:
            self._ticker, self._broken = ticker, broken

        self.submit(take).result()
        return broken

    def rates(self) -> DecodeRates:
        """Return the decode rates so far."""
        return self._clock.rates()

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._run_call():
                    continue
                if self._ticker.has_work:
                    self._tick()
                    continue
                self._clock.idle()
                self._arbiter.set_work(self.lane, has_work=False)
                self._run_call(block=True)
        finally:
            self._arbiter.set_work(self.lane, has_work=False)
            self._ended.set()
            self._cancel_waiting()
            self._over.set()

    def _run_call(self, *, block: bool = False) -> bool:
        """Run one waiting call. Returns False if none waits or if the thread must stop."""
        try:
            item = self._calls.get(block=block)
        except queue.Empty:
            return False
        if item is None:
            return False
        call, future = item
        if future.set_running_or_notify_cancel():
            self._arbiter.set_work(self.lane, has_work=True)
            try:
                with self.lane.turn(self._kind, cancelled=lambda: future.abandoned):
                    result = call()
            except BaseException as error:
                future.set_exception(as_exception(error))
            else:
                future.set_result(result)
        return True

    def _tick(self) -> None:
        self._arbiter.set_urgent(is_urgent=self._ticker.is_urgent)
        self._arbiter.set_long_only(long_only=self._ticker.long_only)
        self._arbiter.set_work(self.lane, has_work=True)
        beside, tokens = self._clock.begin(), 0
        try:
            with self.lane.turn("decode"):
                began = self._arbiter.clock()
                tokens = self._ticker.tick()
                seconds = self._arbiter.clock() - began
        except ExecutorStoppedError:
            return
        except BaseException as error:
            self._ticker = _NoTicker()
            self._broken.set_exception(as_exception(error))
            return
        self._clock.end(beside, tokens, seconds)

    def _cancel_waiting(self) -> None:
        while True:
            try:
                item = self._calls.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item[1].cancel()


class Compute:
    """All compute threads of a process, from `start` to `stop`. Public methods are thread-safe.

    decode: calls and the steps of the engine. learner, evaluation, parity, scoring: calls.
    """

    def __init__(self, *, decode_share: float, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Arguments are those of `Arbiter`."""
        self.arbiter = arbiter = Arbiter(slots=slots, decode_share=decode_share, clock=clock)
        self.decode = ComputeThread(arbiter.decode, arbiter)

        def thread(name: str, kind: WorkKind) -> ComputeThread:
            return ComputeThread(arbiter.lane(name, kind), arbiter, kind)

        self.learner, self.evaluation = thread("learner", "update"), thread("evaluation", "evaluation")
        self.parity, self.scoring = thread("parity", "parity"), thread("scoring", "scoring")

    @property
    def _threads(self) -> tuple[ComputeThread, ...]:
        return self.decode, self.learner, self.evaluation, self.parity, self.scoring

    def attach(self, engine: Ticker, divide_cores: Callable[[int], None]) -> Future[None]:
        """Let an engine decode; see `ComputeThread.attach`. divide_cores: see `Arbiter.divide_cores`."""
        self.arbiter.divide_cores(divide_cores)
        return self.decode.attach(engine)

    def start(self) -> None:
        """Start the threads."""
        sys.setswitchinterval(SWITCH_SECONDS)
        for thread in self._threads:
            thread.start()

    def stop(self, *, timeout: float | None = None) -> bool:
        """Finish the current turns and cancel other work; False if a turn takes longer than `timeout` seconds."""
        for thread in self._threads:
            thread.stop()
        self.arbiter.stop()
        until = None if timeout is None else time.monotonic() + timeout
        ended = True
        for thread in self._threads:
            ended &= thread.stopped(None if until is None else max(0.0, until - time.monotonic()))
        return ended


def _run_and_block(work: list[Callable[[], None]]) -> None:
    """Do the work, release it, and then block forever.

    A thread that has used compiled functions must not end. MLX destroys the thread's cache of compiled functions after
    Python considers the thread joined, and needs the interpreter to do so; a process that exits meanwhile is aborted.
    """
    work.pop()()
    threading.Event().wait()


async def finish(future: concurrent.futures.Future[T]) -> T:
    """Wait in the event loop for a future of another thread, and return its result or raise its exception.

    If the waiting task is cancelled, the future is cancelled too: work that has not started never starts, and work that
    runs ends at its next pause. Raises WorkCancelled if the future was cancelled elsewhere, because a CancelledError
    would look like the cancellation of the waiting task.
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
