"""Whole runs with reward functions that crash, hang, fork and close files: they cost groups, each with its reason."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.pipeline_process import BATCH, UNEVALUATED, Run, RunResult, assert_recorded, lines, run
from tests.e2e.test_kill import check_result
from tests.rewards.hostile_rewards import BEHAVIORS, behavior

HOSTILE = "tests.rewards.hostile_rewards:"
HARMLESS = ("forks_and_returns", "forks_a_child_that_stays", "closes_output", "works")


def finished(run_dir: Path, *flags: str) -> RunResult:
    """Return the result of a run without evaluation."""
    with Run(run_dir, *flags, small=UNEVALUATED) as running:
        return running.finish()


@pytest.mark.slow
def test_a_hostile_reward_costs_only_its_groups(tmp_path: Path) -> None:
    """Every group ends exactly once, and nothing keeps the run directory in use afterwards."""
    steps = 10
    rewards = f'[{{name = "{HOSTILE}misbehaves_by_prompt", timeout_seconds = 2.0, correct = true}}]'
    result = finished(tmp_path / "run", "--rewards", rewards, "--steps", str(steps))
    assert (result.status, result.err) == (0, ""), result
    accounting = result.accounting
    assert (accounting.prompted, accounting.carried_over) == (steps * BATCH, 0)
    assert_recorded(tmp_path / "run", accounting, steps=steps)
    groups = lines(tmp_path / "run" / "rollouts.jsonl")
    assert {behavior(group["prompt"]) for group in groups} == set(BEHAVIORS)
    for group in groups:
        harmless = behavior(group["prompt"]) in HARMLESS
        assert group["reason"] in ((None, "zero_variance") if harmless else ("reward_error",)), group["detail"]
    again = finished(tmp_path / "run", "--resume", "--rewards", rewards, "--steps", str(steps))
    assert again.status == 0, again


@pytest.mark.slow
def test_a_run_whose_reward_holds_the_gil_obeys_signals(tmp_path: Path) -> None:
    """The second SIGTERM stops the run although a call would take an hour."""
    rewards = f'[{{name = "{HOSTILE}regex_without_end", timeout_seconds = 3600.0, correct = true}}]'
    with Run(tmp_path / "run", "--rewards", rewards, "--steps", "4", small=UNEVALUATED) as running:
        running.wait_for("policy")
        running.send(signal.SIGTERM)
        running.wait_for("draining")
        running.send(signal.SIGTERM)
        result = running.finish()
    assert result.status == 128 + signal.SIGTERM, result
    assert result.accounting.carried_over == result.accounting.prompted


@pytest.mark.slow
def test_a_killed_synchronous_run_with_reward_processes_ends_with_identical_bytes(tmp_path: Path) -> None:
    """The values of a function depend on problem and completion only, whichever process computes them."""
    rewards = '[{name = "tests.rewards.sample_rewards:async_length", correct = true}]'
    flags = ("--steps", "9", "--async", "false", "--checkpoint.interval", "1", "--rewards", rewards)
    whole = run(tmp_path / "whole", *flags)
    assert whole.status == 0, whole
    for step, resume in ((3, ()), (6, ("--resume",))):
        with Run(tmp_path / "run", *flags, *resume) as running:
            running.wait_until((tmp_path / "run" / "checkpoints" / f"step-{step:06d}").exists)
    check_result(tmp_path / "run", run(tmp_path / "run", *flags, "--resume"), steps=9)
    tensors, uninterrupted = (tmp_path / name / "adapters/adapters.safetensors" for name in ("run", "whole"))
    assert tensors.read_bytes() == uninterrupted.read_bytes()
