"""Worker threads and process exit with hanging reward functions."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import pytest

from clotho.rewards.values import Completions, Reward, RewardError
from protocols.prompt import Problem
from training_run.rewards.calls import Caller, WorkerLoop, WorkerThreads

PROBLEM = Problem(prompt="?", answer="1", type="echo")


def test_an_idle_thread_is_reused() -> None:
    """Sequential calls use one thread."""
    threads = WorkerThreads()
    used = set()
    for _ in range(50):
        call = threads.start(threading.current_thread)
        used.add(call.future.result(timeout=10))
        while call.alive:  # the thread becomes idle shortly after its result is set
            pass
    threads.close()
    assert len(used) == 1
    used.pop().join(timeout=10)


def test_an_exception_reaches_the_caller_and_the_thread_survives() -> None:
    """Also SystemExit and KeyboardInterrupt."""
    threads = WorkerThreads()
    for error in (ValueError, SystemExit, KeyboardInterrupt):

        def fail(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            threads.start(fail).future.result(timeout=10)
    threads.close()


def test_an_event_loop_that_was_closed_starts_again_with_the_next_call() -> None:
    """It can be closed more than once."""
    loop = WorkerLoop()

    async def answer() -> int:
        return 7

    for _ in range(2):
        assert loop.start(answer).future.result(timeout=10) == 7
        loop.close()
        loop.close()


def test_an_abandoned_python_loop_is_interrupted() -> None:
    """The thread would otherwise use the CPU forever."""
    threads = WorkerThreads()
    entered = threading.Event()

    def spin() -> None:
        entered.set()
        while True:
            pass

    before = set(threading.enumerate())
    call = threads.start(spin)
    (worker,) = set(threading.enumerate()) - before
    assert entered.wait(10)
    call.abandon()
    worker.join(timeout=10)
    assert not call.alive
    assert threads.start(lambda: 7).future.result(timeout=10) == 7
    threads.close()


async def test_an_abandoned_call_is_interrupted_again_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops an exception that is raised inside a finalizer."""
    dropped: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: dropped.append(report.exc_type.__name__))

    class Endless:
        def __del__(self) -> None:
            while True:
                pass

    def reward(problem: Problem, completion: str) -> float:
        if completion == "endless":
            Endless()
            while True:
                pass
        return 1.0

    caller = Caller([Reward(name="mine", function=reward)], timeout_seconds=0.05, threads=WorkerThreads())
    with pytest.raises(RewardError, match="took longer"):
        await caller(Completions(problem=PROBLEM, texts=("endless",)))
    with anyio.fail_after(10):
        while not dropped:
            await anyio.lowlevel.checkpoint()
        caller._timeout_seconds = 10.0
        (hanging,) = caller._hanging
        assert [call.alive for call in caller._hanging] == [True]
        assert await caller(Completions(problem=PROBLEM, texts=("good",))) == [(1.0,)]
        while hanging.alive:
            await anyio.lowlevel.checkpoint()
    assert dropped == ["Interrupted"]


def test_abandoning_a_call_as_it_finishes_does_not_affect_later_calls() -> None:
    """Later calls return their own results."""
    threads = WorkerThreads()
    for i in range(300):
        call = threads.start(lambda: sum(range(50)))
        call.abandon()
        assert threads.start(lambda i=i: i).future.result(timeout=10) == i  # type: ignore[misc]
    threads.close()


HANGING = """
import anyio
from training_run.rewards.runner import RewardRunner
from training_run.profile.schema import RewardSection
from tests.rewards.groups import group

async def main():
    for name in ("hangs", "hangs_async", "blocks_its_loop", "spins"):
        section = RewardSection(name=f"tests.rewards.sample_rewards:{name}", timeout_seconds=0.05, run_in="thread")
        outcome = await RewardRunner((section,)).score(group("a", "b"))
        assert outcome.reason == "reward_error" and "took longer" in outcome.detail, outcome

anyio.run(main)
raise SystemExit(7)
"""


def test_the_process_exits_while_reward_functions_hang() -> None:
    """Hanging calls run in daemon threads."""
    done = subprocess.run([sys.executable, "-c", HANGING], timeout=240, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")


def test_a_call_that_has_ended_is_not_interrupted() -> None:
    """Abandoning it changes nothing for the next call of the same thread."""
    threads = WorkerThreads()
    first = threads.start(threading.get_ident)
    ident = first.future.result(timeout=10)
    while first.alive:  # the thread becomes idle shortly after its result is set
        pass
    first.abandon()
    for _ in range(20):
        following = threads.start(threading.get_ident)
        assert following.future.result(timeout=10) == ident
        while following.alive:
            pass
    threads.close()
