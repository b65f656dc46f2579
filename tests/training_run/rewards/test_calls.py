"""Calls of reward functions in threads, and the exit of a process with hanging functions."""

from __future__ import annotations

import subprocess
import sys
import threading

import anyio
import pytest

from clotho.lanes.compute_thread import Compute
from clotho.rewards.values import Completions, Reward, RewardError, Values
from protocols.prompt import Problem
from training_run.rewards import calls
from training_run.rewards.calls import Caller, ModelCaller, WorkerLoop

SEEN = Completions(problem=Problem(prompt="?", answer="1", type="echo"), texts=("a",))


class HangingModel:
    """A reward model that never answers."""

    async def begin(self, compute: Compute) -> None:
        """Do nothing."""

    async def score(self, completions: Completions) -> Values:
        """Wait."""
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_model_that_takes_too_long_fails_its_group() -> None:
    """The message names it."""
    with anyio.fail_after(5), pytest.raises(RewardError, match="judge took longer than"):
        await ModelCaller("judge", HangingModel(), timeout_seconds=0.01)(SEEN)


def test_an_event_loop_that_was_closed_starts_again_with_the_next_call() -> None:
    """It can be closed more than once."""
    loop = WorkerLoop()

    async def answer() -> int:
        return 7

    for _ in range(2):
        assert loop.start(answer()).result(timeout=10) == 7
        loop.close()
        loop.close()


async def test_a_function_that_hangs_too_often_is_not_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hanging call has a thread. When one ends, the function is called again."""
    monkeypatch.setattr(calls, "MAX_HANGING_CALLS", 1)
    monkeypatch.setattr(calls, "WAIT_SECONDS", 0.05)
    released = threading.Event()

    def reward(problem: Problem, completion: str) -> float:
        released.wait()
        return 1.0

    caller = Caller([Reward(name="mine", function=reward)], timeout_seconds=0.05, concurrency=1)
    for _ in range(2):
        with pytest.raises(RewardError, match="took longer"):
            await caller(SEEN)
    with pytest.raises(RewardError, match="hang"):
        await caller(SEEN)
    released.set()
    with anyio.fail_after(60):
        while True:
            try:
                assert await caller(SEEN) == [(1.0,)]
                break
            except RewardError:
                continue


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
