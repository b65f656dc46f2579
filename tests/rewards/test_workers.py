from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from clotho.rewards.workers import WorkerThreads


def test_a_thread_that_has_finished_is_used_again() -> None:
    """One after another needs one thread."""
    threads = WorkerThreads()
    used = set()
    for _ in range(50):
        call = threads.start(threading.current_thread)
        used.add(call.future.result(timeout=10))
        while call.alive:  # from its result to its readiness are a few instructions
            pass
    threads.close()
    assert len(used) == 1
    used.pop().join(timeout=10)


def test_errors_come_back_to_the_caller_and_spare_the_thread() -> None:
    """SystemExit among them."""
    threads = WorkerThreads()
    for error in (ValueError, SystemExit, KeyboardInterrupt):

        def fail(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            threads.start(fail).future.result(timeout=10)
    threads.close()


def test_an_abandoned_loop_in_python_ends() -> None:
    """Its thread would otherwise take time from the training for ever."""
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


def test_abandoning_at_the_moment_of_the_result_harms_no_other_call() -> None:
    """Whichever comes first, later calls have their own results."""
    threads = WorkerThreads()
    for i in range(300):
        call = threads.start(lambda: sum(range(50)))
        call.abandon()
        assert threads.start(lambda i=i: i).future.result(timeout=10) == i  # type: ignore[misc]
    threads.close()


HANGING = """
import anyio
from clotho.rewards.runner import RewardRunner
from clotho.config.schema import RewardSection
from tests.rewards.groups import group

async def main():
    for name in ("hangs", "hangs_async", "blocks_its_loop", "spins"):
        section = RewardSection(name=f"tests.rewards.sample_rewards:{name}", timeout_seconds=0.05)
        outcome = await RewardRunner((section,)).score(group("a", "b"))
        assert outcome.reason == "reward_error" and "took longer" in outcome.detail, outcome

anyio.run(main)
raise SystemExit(7)
"""


def test_a_process_ends_although_rewards_hang() -> None:
    """Hanging calls are in daemon threads that no exit handler joins."""
    done = subprocess.run([sys.executable, "-c", HANGING], timeout=30, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
