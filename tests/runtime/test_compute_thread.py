"""The compute thread: order, fair sharing, cancellation and errors; and waiting for its results on the event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from clotho.runtime.compute_thread import URGENT_SECONDS, ComputeExecutor, WorkCancelled, finish
from protocols.errors import ExecutorStoppedError


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """Yield a running executor with equal shares."""
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    yield executor
    executor.stop(timeout=10)


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
        self.order: list[str] = []
        self.is_urgent = False

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def tick(self) -> int:
        self.clock.now += 0.001
        self.order.append("tick")
        self.left -= 1
        return 1


def counting_job(order: list[str], label: str, turns: int) -> Generator[None, None, str]:
    """Return a cooperative job of `turns` turns."""
    for _ in range(turns):
        order.append(label)
        yield
    return label


def test_every_call_runs_in_the_same_thread(executor: ComputeExecutor) -> None:
    """MLX streams and the random state belong to one thread."""
    idents = {executor.submit(threading.get_ident).result(5) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_an_error_is_raised_at_the_caller_and_the_thread_continues(executor: ComputeExecutor) -> None:
    """A failed call affects only its caller."""
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(5)
    assert executor.submit(lambda: 7).result(5) == 7


def test_a_cooperative_job_returns_the_value_of_its_generator(executor: ComputeExecutor) -> None:
    """The result of `submit_steps` is the generator's return value."""
    assert executor.submit_steps(counting_job([], "done", 3), kind="scoring").result(5) == "done"


def test_cooperative_jobs_alternate(executor: ComputeExecutor) -> None:
    """Two long jobs advance round-robin."""
    order: list[str] = []
    gate = threading.Event()
    executor.submit(gate.wait)
    both = [executor.submit_steps(counting_job(order, label, 5), kind="scoring") for label in "ab"]
    gate.set()
    for future in both:
        future.result(5)
    assert order == ["a", "b"] * 5


def test_calls_run_before_the_next_turn_of_a_job(executor: ComputeExecutor) -> None:
    """A weight swap waits for at most one turn."""
    order: list[str] = []

    def job() -> Generator[None, None, None]:
        for turn in range(3):
            order.append(f"turn {turn}")
            if turn == 0:
                executor.submit(lambda: order.append("call"))
            yield

    executor.submit_steps(job(), kind="scoring").result(5)
    assert order == ["turn 0", "call", "turn 1", "turn 2"]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_decoding_gets_its_share_while_a_job_runs(share: float) -> None:
    """With ticks of 1 ms and steps of 4 ms, ticks take `decode_share` of the contended time, within two turns."""
    clock = Clock()
    executor = ComputeExecutor(decode_share=share, clock=clock)
    spinner = Spinner(10**6, clock)

    def job() -> Generator[None, None, None]:
        for _ in range(40):
            clock.now += 0.004
            spinner.order.append("step")
            yield

    executor.start()
    executor.attach(spinner)
    executor.submit_steps(job(), kind="update").result(30)
    executor.stop(timeout=10)
    first, last = spinner.order.index("step"), len(spinner.order) - 1 - spinner.order[::-1].index("step")
    ticks = spinner.order[first:last].count("tick")
    assert ticks / (ticks + 40 * 4) == pytest.approx(share, abs=0.05)
    assert executor.rates().learning == pytest.approx(1000 * share, rel=0.1)
    assert executor.rates().share == pytest.approx(share, abs=0.05)


def test_decoding_alone_is_measured_apart_from_decoding_beside_a_job() -> None:
    """1 token per millisecond while no job runs, independent of the time beside jobs."""
    clock = Clock()
    executor = ComputeExecutor(decode_share=0.5, clock=clock)
    done = threading.Event()

    class Last(Spinner):
        def tick(self) -> int:
            sampled = super().tick()
            if not self.has_work:
                done.set()
            return sampled

    executor.start()
    executor.attach(Last(100, clock))
    executor.submit(lambda: None).result(5)
    assert done.wait(5)
    executor.stop(timeout=5)
    assert executor.rates().idle == pytest.approx(1000.0)
    assert executor.rates().learning == 0.0


def test_a_cancelled_job_is_closed_at_its_next_turn(executor: ComputeExecutor) -> None:
    """An abandoned update releases its memory."""
    closed = threading.Event()

    def job() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    future = executor.submit_steps(job(), kind="scoring")
    executor.submit(lambda: None).result(5)
    assert future.cancel()
    assert closed.wait(5)


def test_a_failing_tick_is_reported_and_the_thread_continues(executor: ComputeExecutor) -> None:
    """The failed engine gets no more turns. Calls still work."""

    class Broken(Spinner):
        def tick(self) -> int:
            raise RuntimeError("no more memory")

    broken = executor.attach(Broken(1, Clock()))
    executor.submit(lambda: None).result(5)
    with pytest.raises(RuntimeError, match="no more memory"):
        broken.result(5)
    assert executor.submit(lambda: 1).result(5) == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_no_exception_ends_the_thread(executor: ComputeExecutor, kind: type[BaseException]) -> None:
    """Calls, jobs and decode steps can raise exceptions that would end an event loop; their futures raise
    RuntimeError instead, and the thread continues.
    """

    def fail() -> int:
        raise kind("stop")

    def job() -> Generator[None, None, None]:
        yield
        fail()

    broken = executor.attach(FailingTicker(fail))
    for future in (broken, executor.submit(fail), executor.submit_steps(job(), kind="scoring")):
        error = future.exception(5)
        assert isinstance(error, RuntimeError)
        assert isinstance(error.__cause__, kind)
    assert executor.submit(lambda: 7).result(5) == 7


class FailingTicker:
    """A decode engine that fails."""

    has_work, is_urgent = True, False

    def __init__(self, tick: Callable[[], int]) -> None:
        self.tick = tick


def test_an_executor_between_turns_is_not_busy() -> None:
    """`busy_since` is the start of the current turn."""
    clock = Clock()
    clock.now = 7.0
    executor = ComputeExecutor(decode_share=0.5, clock=clock)
    executor.start()
    assert executor.submit(lambda: executor.busy_since).result(5) == 7.0
    executor.stop(timeout=5)
    assert executor.busy_since == math.inf


def test_a_stopped_executor_cancels_waiting_work_and_refuses_more() -> None:
    """The current turn completes. No caller waits forever."""
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    begun, gate = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return gate.wait(5)

    turn = executor.submit(occupy)
    assert begun.wait(5)
    waiting, long = executor.submit(lambda: 1), executor.submit_steps(counting_job([], "x", 10**9), kind="scoring")
    executor.stop(timeout=0)
    gate.set()
    executor.stop(timeout=5)
    assert turn.result(5) is True
    assert waiting.cancelled()
    assert long.cancelled()
    with pytest.raises(ExecutorStoppedError):
        executor.submit(lambda: 1)


def test_a_turn_that_does_not_end_is_reported() -> None:
    """`stop` returns False after its timeout, and True when the turn has ended."""
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    begun, free = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return free.wait(20)

    executor.submit(occupy)
    assert begun.wait(20)
    assert not executor.stop(timeout=0.01)
    free.set()
    assert executor.stop(timeout=20)


async def test_finish_returns_the_result_or_raises_the_error_of_the_work() -> None:
    """The error is raised as in its thread."""
    with ThreadPoolExecutor(1) as pool, fail_after(5):
        assert await finish(pool.submit(lambda: 42)) == 42
        with pytest.raises(ZeroDivisionError):
            await finish(pool.submit(lambda: 1 // 0))


async def test_a_cancelled_waiter_cancels_work_that_has_not_begun() -> None:
    """The future is cancelled, so the thread skips the work."""
    future: Future[int] = Future()
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(finish, future)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert future.cancelled()


async def test_a_cancelled_waiter_does_not_stop_running_work() -> None:
    """The waiter is free at once. The job completes without a reader."""
    release, finished = threading.Event(), threading.Event()

    def work() -> None:
        assert release.wait(5)
        finished.set()

    with ThreadPoolExecutor(1) as pool, fail_after(5):
        future = pool.submit(work)
        async with create_task_group() as group:
            group.start_soon(finish, future)
            await wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert not finished.is_set()
        release.set()
    assert finished.is_set()


async def test_work_cancelled_by_its_thread_raises_an_error() -> None:
    """A CancelledError would end the waiting task silently."""
    future: Future[int] = Future()
    future.cancel()
    with fail_after(5), pytest.raises(WorkCancelled):
        await finish(future)


def timed_job(clock: Clock, *seconds: float) -> Generator[None, None, None]:
    """A job whose turns take this long."""
    for turn in seconds:
        clock.now += turn
        yield


def test_the_longest_turn_of_the_learner_is_measured_since_the_last_reading() -> None:
    """Turns of other jobs do not count; reading resets the value."""
    clock = Clock()
    executor, job = ComputeExecutor(decode_share=0.5, clock=clock), partial(timed_job, clock)
    executor.start()
    try:
        executor.submit_steps(job(0.5, 2.0, 0.25), kind="update").result(5)
        executor.submit_steps(job(9.0), kind="scoring").result(5)
        assert executor.take_longest_learner_turn() == 2.0
        assert executor.take_longest_learner_turn() == 0.0
    finally:
        executor.stop()


def test_turns_are_measured_by_kind() -> None:
    """Number, total and longest duration of calls, decode steps and each kind of job; kinds without a turn are zero."""
    clock = Clock()
    executor = ComputeExecutor(decode_share=0.5, clock=clock)
    spinner, job = Spinner(3, clock), partial(timed_job, clock)
    executor.start()
    try:
        executor.submit_steps(job(0.5, 2.0), kind="parity").result(5)
        executor.attach(spinner)
        executor.submit_steps(job(0.5), kind="update").result(5)
        while executor.submit(lambda: spinner.has_work).result(5):
            pass
        found = executor.turn_times()
    finally:
        executor.stop()
    assert found["parity"].longest == 2.0
    assert found["parity"].seconds.total == 2.5
    assert sum(found["parity"].seconds.counts) == 3  # the last one returns the result
    assert sum(found["decode"].seconds.counts) == 3
    assert found["decode"].longest == pytest.approx(0.001)
    assert found["update"].longest == 0.5
    assert found["evaluation"].longest == sum(found["evaluation"].seconds.counts) == 0


def test_urgent_decode_steps_come_before_jobs_up_to_a_limit() -> None:
    """They exceed the share of decoding by `URGENT_SECONDS`; then both sides alternate by share."""
    clock = Clock()
    executor = ComputeExecutor(decode_share=0.5, clock=clock)
    spinner = Spinner(10**6, clock)

    def job() -> Generator[None, None, None]:
        for _ in range(400):
            clock.now += 0.01
            spinner.is_urgent = True
            spinner.order.append("step")
            yield

    executor.start()
    executor.attach(spinner)
    executor.submit_steps(job(), kind="update").result(30)
    executor.stop(timeout=10)
    steps = [at for at, what in enumerate(spinner.order) if what == "step"]
    between = [after - before - 1 for before, after in pairwise(steps)]
    assert max(between) * 0.001 == pytest.approx(URGENT_SECONDS, abs=0.02)
    late = between[len(between) // 2 :]
    assert sum(late) * 0.001 == pytest.approx(len(late) * 0.01, rel=0.02)
