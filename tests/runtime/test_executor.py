"""The compute thread: order, sharing, cancellation, errors."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from clotho.runtime.compute_thread import ComputeExecutor
from protocols.errors import ExecutorStoppedError


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A running executor that shares its time equally."""
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    yield executor
    executor.stop(timeout=10)


class Clock:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Spinner:
    """A ticker that draws `tokens` tokens in ticks of one millisecond each."""

    def __init__(self, tokens: int, clock: Clock) -> None:
        self.left, self.clock = tokens, clock
        self.order: list[str] = []

    @property
    def has_work(self) -> bool:
        return self.left > 0

    def tick(self) -> int:
        self.clock.now += 0.001
        self.order.append("tick")
        self.left -= 1
        return 1


def counting(order: list[str], label: str, turns: int) -> Generator[None, None, str]:
    """A cooperative job of `turns` turns."""
    for _ in range(turns):
        order.append(label)
        yield
    return label


def test_every_call_runs_in_one_and_the_same_thread(executor: ComputeExecutor) -> None:
    """MLX streams and random state belong to a thread, so there is exactly one."""
    idents = {executor.submit(threading.get_ident).result(5) for _ in range(20)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_an_error_returns_to_the_caller_and_the_thread_lives_on(executor: ComputeExecutor) -> None:
    """A failing call is its caller's problem alone."""
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(5)
    assert executor.submit(lambda: 7).result(5) == 7


def test_a_cooperative_job_returns_its_generators_value(executor: ComputeExecutor) -> None:
    """The result of `submit_steps` is what the generator returns."""
    assert executor.submit_steps(counting([], "done", 3)).result(5) == "done"


def test_cooperative_jobs_take_turns(executor: ComputeExecutor) -> None:
    """Two long jobs advance round-robin; neither starves."""
    order: list[str] = []
    gate = threading.Event()
    executor.submit(gate.wait)
    both = [executor.submit_steps(counting(order, label, 5)) for label in "ab"]
    gate.set()
    for future in both:
        future.result(5)
    assert order == ["a", "b"] * 5


def test_calls_go_before_the_next_turn_of_a_long_job(executor: ComputeExecutor) -> None:
    """A swap of weights waits for one turn at most, however long the job."""
    order: list[str] = []

    def job() -> Generator[None, None, None]:
        for turn in range(3):
            order.append(f"turn {turn}")
            if turn == 0:
                executor.submit(lambda: order.append("call"))
            yield

    executor.submit_steps(job()).result(5)
    assert order == ["turn 0", "call", "turn 1", "turn 2"]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_decoding_gets_its_share_of_the_time_while_a_job_runs(share: float) -> None:
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
    executor.submit_steps(job(), learning=True).result(30)
    executor.stop(timeout=10)
    first, last = spinner.order.index("step"), len(spinner.order) - 1 - spinner.order[::-1].index("step")
    ticks = spinner.order[first:last].count("tick")
    assert ticks / (ticks + 40 * 4) == pytest.approx(share, abs=0.05)
    assert executor.rates().learning == pytest.approx(1000 * share, rel=0.1)


def test_decoding_alone_is_counted_apart_from_decoding_beside_a_job() -> None:
    """Tokens per second while idle: 1 per millisecond, whatever happened beside jobs."""
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


def test_cancelling_a_job_closes_it_at_its_next_turn(executor: ComputeExecutor) -> None:
    """An update that nobody waits for any more releases what it holds."""
    closed = threading.Event()

    def job() -> Generator[None, None, None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    future = executor.submit_steps(job())
    executor.submit(lambda: None).result(5)
    assert future.cancel()
    assert closed.wait(5)


def test_a_tick_that_raises_is_reported_and_the_thread_lives_on(executor: ComputeExecutor) -> None:
    """A broken engine is told to whoever watches it, gets no more turns, and calls still work."""

    class Broken(Spinner):
        def tick(self) -> int:
            raise RuntimeError("no more memory")

    broken = executor.attach(Broken(1, Clock()))
    executor.submit(lambda: None).result(5)
    with pytest.raises(RuntimeError, match="no more memory"):
        broken.result(5)
    assert executor.submit(lambda: 1).result(5) == 1


def test_between_turns_the_executor_is_not_busy(executor: ComputeExecutor) -> None:
    """`busy_since` tells a watchdog how long the turn in progress has lasted."""
    seen = executor.submit(lambda: executor.busy_since).result(5)
    assert seen <= time.monotonic()
    executor.stop(timeout=5)
    assert executor.busy_since == math.inf


def test_a_stopped_executor_cancels_what_waits_and_refuses_more() -> None:
    """The turn in progress is finished; nobody waits for ever on a call or a job that never began."""
    executor = ComputeExecutor(decode_share=0.5)
    executor.start()
    begun, gate = threading.Event(), threading.Event()

    def occupy() -> bool:
        begun.set()
        return gate.wait(5)

    turn = executor.submit(occupy)
    assert begun.wait(5)
    waiting, long = executor.submit(lambda: 1), executor.submit_steps(counting([], "x", 10**9))
    executor.stop(timeout=0)
    gate.set()
    executor.stop(timeout=5)
    assert turn.result(5) is True
    assert waiting.cancelled()
    assert long.cancelled()
    with pytest.raises(ExecutorStoppedError):
        executor.submit(lambda: 1)
