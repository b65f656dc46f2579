"""Compute threads: calls, decode steps, cancellation and errors; and waiting for results on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import get_args

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.lanes.arbiter import WorkCancelled, WorkKind
from clotho.lanes.compute_thread import Compute, ComputeThread, finish
from protocols.errors import ExecutorStoppedError

LIMIT = 60.0
"""Seconds after which a test fails instead of waiting for ever."""

THREADS: dict[str, Callable[[Compute], ComputeThread]] = {
    "decode": lambda compute: compute.decode,
    "learner": lambda compute: compute.learner,
    "evaluation": lambda compute: compute.evaluation,
    "parity": lambda compute: compute.parity,
    "scoring": lambda compute: compute.scoring,
}

any_thread = pytest.mark.parametrize("thread", THREADS.values(), ids=THREADS)
any_slots = pytest.mark.parametrize("slots", [1, 2])


class Clock:
    """A clock that only work advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Spinner:
    """A ticker that samples `tokens` tokens in ticks of one millisecond."""

    def __init__(self, tokens: int, clock: Clock) -> None:
        self.left, self.clock = tokens, clock
        self.is_urgent = self.long_only = False
        self.done, self.begun = threading.Event(), threading.Event()

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def tick(self) -> int:
        self.begun.set()
        self.clock.now += 0.001
        self.left -= 1
        if not self.left:
            self.done.set()
        return 1


class FailingTicker:
    """A decode engine that fails."""

    has_work, is_urgent, long_only = True, False, False

    def __init__(self, tick: Callable[[], int]) -> None:
        self.tick = tick


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Compute threads with equal shares of one slot."""
    compute = Compute(decode_share=0.5, slots=1)
    compute.start()
    yield compute
    assert compute.stop(timeout=LIMIT)


@pytest.fixture
def simulated(clock: Clock) -> Iterator[Compute]:
    """The same, with a clock that only work advances."""
    compute = Compute(decode_share=0.5, slots=1, clock=clock)
    compute.start()
    yield compute
    assert compute.stop(timeout=LIMIT)


@any_thread
def test_every_call_runs_in_the_same_thread(compute: Compute, thread: Callable[[Compute], ComputeThread]) -> None:
    """MLX streams and the random state belong to one thread."""
    idents = {thread(compute).submit(threading.get_ident).result(LIMIT) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_each_component_has_a_thread_of_its_own(compute: Compute) -> None:
    """Each thread builds graphs of its own."""
    idents = [thread(compute).submit(threading.get_ident).result(LIMIT) for thread in THREADS.values()]
    assert len(set(idents)) == len(THREADS)


@any_thread
def test_calls_of_a_thread_run_one_after_the_other(
    compute: Compute, thread: Callable[[Compute], ComputeThread]
) -> None:
    """In the order of their submission, also if they pause."""
    order: list[int] = []
    one = thread(compute)

    def call(number: int) -> None:
        for _ in range(3):
            order.append(number)
            one.lane.pause()

    for future in [one.submit(lambda number=number: call(number)) for number in range(5)]:  # type: ignore[misc]
        future.result(LIMIT)
    assert order == [number for number in range(5) for _ in range(3)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_no_exception_ends_a_thread(compute: Compute, kind: type[BaseException]) -> None:
    """Calls and decode steps can raise exceptions that would end an event loop; their futures raise RuntimeError
    instead, and the thread continues.
    """

    def fail() -> int:
        raise kind("stop")

    broken = compute.decode.attach(FailingTicker(fail))
    for future in (broken, compute.decode.submit(fail), compute.learner.submit(fail)):
        error = future.exception(LIMIT)
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, kind)
    assert compute.decode.submit(lambda: 7).result(LIMIT) == 7
    assert compute.learner.submit(lambda: 7).result(LIMIT) == 7


def test_a_failing_tick_is_reported_and_the_thread_continues(compute: Compute, clock: Clock) -> None:
    """The failed engine gets no more turns. Calls still work, and so does the next engine."""

    def fail() -> int:
        raise RuntimeError("no more memory")

    broken = compute.decode.attach(FailingTicker(fail))
    with pytest.raises(RuntimeError, match="no more memory"):
        broken.result(LIMIT)
    assert compute.decode.submit(lambda: 1).result(LIMIT) == 1
    spinner = Spinner(3, clock)
    compute.decode.attach(spinner)
    assert spinner.done.wait(LIMIT)


def test_calls_run_before_the_next_decode_step(compute: Compute, clock: Clock) -> None:
    """A weight swap waits for at most one step."""
    spinner, left = Spinner(10**9, clock), list[int]()

    def submitted() -> int:
        """Submit a call during a step, and return the number of steps that are left."""
        call = compute.decode.submit(lambda: left.append(spinner.left))
        call.add_done_callback(lambda _: seen.set())
        spinner.left -= 1
        return 1

    seen = threading.Event()
    before = spinner.left
    spinner.tick = submitted  # type: ignore[method-assign]
    compute.decode.attach(spinner)
    assert seen.wait(LIMIT)
    assert left[0] == before - 1


@any_slots
def test_decoding_goes_on_while_other_threads_compute(clock: Clock, slots: int) -> None:
    """Between the turns of a call with one slot, and beside it with two."""
    compute, spinner = Compute(decode_share=0.5, slots=slots), Spinner(1000, clock)
    compute.start()
    compute.decode.attach(spinner)

    def learn() -> None:
        while not spinner.done.is_set():
            compute.learner.lane.pause()

    compute.learner.submit(learn).result(LIMIT)
    assert spinner.left == 0
    assert compute.stop(timeout=LIMIT)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_decoding_beside_the_learner_is_measured(clock: Clock, share: float) -> None:
    """Steps of 1 ms and turns of 4 ms: the rate and the share are those of the time that the learner had work."""
    compute, spinner = Compute(decode_share=share, slots=1, clock=clock), Spinner(10**9, clock)
    compute.start()

    def learn() -> None:
        compute.decode.submit(lambda: None)  # the decode thread has work from now on
        for _ in range(100):
            clock.now += 0.004
            compute.learner.lane.pause()

    compute.decode.attach(spinner)
    assert spinner.begun.wait(LIMIT)
    compute.learner.submit(learn).result(LIMIT)
    assert compute.stop(timeout=LIMIT)
    rates = compute.decode.rates()
    assert rates.learning == pytest.approx(1000 * share, rel=0.1)
    assert rates.share == pytest.approx(share, abs=0.05)


def test_decoding_alone_is_measured_apart_from_decoding_beside_others(simulated: Compute, clock: Clock) -> None:
    """1 token per millisecond while nothing else has work."""
    spinner = Spinner(100, clock)
    simulated.decode.attach(spinner)
    assert spinner.done.wait(LIMIT)
    simulated.decode.submit(lambda: None).result(LIMIT)
    rates = simulated.decode.rates()
    assert rates.idle == pytest.approx(1000.0)
    assert (rates.learning, rates.share) == (0.0, 0.0)
    assert rates.tokens == 100
    assert rates.seconds == pytest.approx(0.1)


def test_decoding_beside_other_work_is_measured_in_neither_rate(clock: Clock) -> None:
    """It only counts in the totals."""
    compute, spinner = Compute(decode_share=0.5, slots=2, clock=clock), Spinner(100, clock)
    compute.start()

    def evaluate() -> None:
        compute.decode.attach(spinner)
        assert spinner.done.wait(LIMIT)
        compute.decode.submit(lambda: None).result(LIMIT)

    compute.evaluation.submit(evaluate).result(LIMIT)
    rates = compute.decode.rates()
    assert (rates.idle, rates.learning, rates.tokens) == (0.0, 0.0, 100)
    assert compute.stop(timeout=LIMIT)


@any_slots
def test_a_cancelled_call_ends_at_its_next_pause(slots: int) -> None:
    """An abandoned update releases its memory, and the thread continues."""
    compute = Compute(decode_share=0.5, slots=slots)
    compute.start()
    begun, closed = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        try:
            while True:
                compute.learner.lane.pause()
        finally:
            closed.set()

    future = compute.learner.submit(call)
    assert begun.wait(LIMIT)
    assert not future.cancel(), "it runs"
    with pytest.raises(WorkCancelled):
        future.result(LIMIT)
    assert closed.is_set()
    assert compute.learner.submit(lambda: 7).result(LIMIT) == 7
    assert compute.stop(timeout=LIMIT)


def test_a_cancelled_call_that_has_not_begun_never_begins(compute: Compute) -> None:
    """Calls behind it run."""
    gate, ran = threading.Event(), list[str]()
    compute.learner.submit(lambda: gate.wait(LIMIT))
    waiting = compute.learner.submit(lambda: ran.append("cancelled"))
    last = compute.learner.submit(lambda: ran.append("last"))
    assert waiting.cancel()
    gate.set()
    last.result(LIMIT)
    assert ran == ["last"]


@any_slots
def test_stopped_threads_cancel_waiting_work_and_refuse_more(slots: int) -> None:
    """Present turns complete, and their calls end there. No caller waits forever."""
    compute = Compute(decode_share=0.5, slots=slots)
    compute.start()
    begun, gate = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return gate.wait(LIMIT)

    def learn() -> None:
        occupy()
        while True:
            compute.learner.lane.pause()

    turn = compute.learner.submit(learn)
    assert begun.wait(LIMIT)
    waiting = [compute.learner.submit(learn) for _ in range(2)]
    compute.stop(timeout=0)
    gate.set()
    assert compute.stop(timeout=LIMIT)
    assert isinstance(turn.exception(LIMIT), ExecutorStoppedError)
    assert all(one.cancelled() for one in waiting)
    for thread in THREADS.values():
        with pytest.raises(ExecutorStoppedError):
            thread(compute).submit(lambda: 1)


def test_a_call_without_a_pause_completes_while_the_threads_stop() -> None:
    """Its caller gets the result."""
    compute = Compute(decode_share=0.5, slots=2)
    compute.start()
    begun, gate = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return gate.wait(LIMIT)

    turn = compute.decode.submit(occupy)
    assert begun.wait(LIMIT)
    assert not compute.stop(timeout=0.01), "a turn that does not end is reported"
    gate.set()
    assert compute.stop(timeout=LIMIT)
    assert turn.result(LIMIT) is True


def test_no_call_is_lost_while_a_thread_stops() -> None:
    """Calls that are submitted at that moment complete, are cancelled or are refused, also if they wait for a turn."""
    for _ in range(5):
        compute = Compute(decode_share=0.5, slots=2)
        compute.start()
        gate = threading.Barrier(3)

        def submit(compute: Compute = compute, gate: threading.Barrier = gate) -> list[Future[None]]:
            gate.wait(LIMIT)
            submitted: list[Future[None]] = []
            while len(submitted) < 1000:
                try:
                    submitted.append(compute.learner.submit(lambda: None))
                except ExecutorStoppedError:
                    break
            return submitted

        with ThreadPoolExecutor(2) as pool:
            submissions = [pool.submit(submit) for _ in range(2)]
            gate.wait(LIMIT)
            assert compute.stop(timeout=LIMIT)
            for future in (future for one in submissions for future in one.result(LIMIT)):
                with suppress(CancelledError, ExecutorStoppedError):
                    future.result(LIMIT)


async def test_finish_returns_the_result_or_raises_the_error_of_the_work() -> None:
    """The error is raised as in its thread."""
    with ThreadPoolExecutor(1) as pool, fail_after(LIMIT):
        assert await finish(pool.submit(lambda: 42)) == 42
        with pytest.raises(ZeroDivisionError):
            await finish(pool.submit(lambda: 1 // 0))


async def test_a_cancelled_waiter_cancels_work_that_has_not_begun() -> None:
    """The future is cancelled, so the thread skips the work."""
    future: Future[int] = Future()
    with fail_after(LIMIT):
        async with create_task_group() as group:
            group.start_soon(finish, future)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert future.cancelled()


async def test_a_cancelled_waiter_ends_running_work_at_its_next_pause(compute: Compute) -> None:
    """The waiter is free at once."""
    begun, release, ended = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert release.wait(LIMIT)
        try:
            compute.learner.lane.pause()
        except WorkCancelled:
            ended.append("at the pause")
            raise

    with fail_after(LIMIT):
        async with create_task_group() as group:
            group.start_soon(finish, compute.learner.submit(work))
            await asyncio.to_thread(begun.wait, LIMIT)
            group.cancel_scope.cancel()
    assert not ended
    release.set()
    compute.learner.submit(lambda: None).result(LIMIT)
    assert ended == ["at the pause"]


async def test_work_cancelled_by_its_thread_raises_an_error() -> None:
    """A CancelledError would end the waiting task silently."""
    future: Future[int] = Future()
    future.cancel()
    with fail_after(LIMIT), pytest.raises(WorkCancelled):
        await finish(future)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("learner", "update"), ("evaluation", "evaluation"), ("parity", "parity"), ("scoring", "scoring")],
)
def test_work_has_the_kind_of_its_thread_before_the_first_turn(name: str, kind: WorkKind) -> None:
    """The first call of the learner counts as an update while it waits for its turn."""
    compute = Compute(decode_share=0.5, slots=1)
    compute.arbiter.set_work(THREADS[name](compute).lane, has_work=True)
    assert [one for one in get_args(WorkKind) if compute.arbiter.works(one)] == [kind]


def test_turns_are_measured_by_kind(simulated: Compute, clock: Clock) -> None:
    """Calls of the decode thread, its steps, and the turns of each other thread; kinds without a turn are zero."""

    def work(*seconds: float) -> None:
        for one in seconds:
            clock.now += one
            simulated.parity.lane.pause()

    spinner = Spinner(3, clock)
    simulated.parity.submit(lambda: work(0.5, 2.0)).result(LIMIT)
    simulated.decode.attach(spinner)
    assert spinner.done.wait(LIMIT)
    simulated.decode.submit(lambda: None).result(LIMIT)
    found = simulated.arbiter.turn_times()
    assert (found["parity"].longest, found["parity"].seconds.total) == (2.0, 2.5)
    assert sum(found["parity"].seconds.counts) == 3  # the last one returns the result
    assert sum(found["decode"].seconds.counts) == 3
    assert found["decode"].longest == pytest.approx(0.001)
    assert sum(found["call"].seconds.counts) >= 1
    assert found["evaluation"].longest == sum(found["evaluation"].seconds.counts) == 0
