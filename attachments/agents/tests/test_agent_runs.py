"""Runs whose episodes have several turns: the guessing game that the project ships."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from tests.e2e.pipeline_process import adapter, killed_at_moments, lines, metrics, run
from training_run.__main__ import main
from training_run.commands.evaluate import Evaluation

GAME = (
    "--profile", "guessing", "--server.port", "0", "--learner.batch-size", "4", "--sampling.group-size", "4",
    "--async", "false", "--checkpoint.interval", "1",
)  # fmt: skip


def test_the_policy_learns_from_conversations_with_an_environment(tmp_path: Path) -> None:
    """In training and in evaluations. What the sampler recorded of several turns equals what the learner computes."""
    result = run(tmp_path / "run", *GAME, "--steps", "2", "--eval.problems", "4", small=())
    assert result.status == 0, result.err
    assert result.accounting.prompted == 8
    for line in metrics(tmp_path / "run"):
        assert 1 < line["agent/turns"] <= 3
        assert line["agent/failed"] == 0
        assert line["mismatch_kl"] < 1e-9
    groups = lines(tmp_path / "run" / "rollouts.jsonl")
    assert any(" now?" in one["text"] for group in groups for one in group["completions"]), "hints are recorded"
    first, last = lines(tmp_path / "run" / "evaluations.jsonl")
    assert first["problems"] == last["problems"] == 4
    assert 0 <= first["rewards"]["environment"]["value"] <= 1


@pytest.mark.slow  # twenty runs in processes of their own
def test_a_synchronous_run_that_is_killed_at_twenty_moments_ends_with_equal_weights(tmp_path: Path) -> None:
    """Bit by bit: what an episode samples does not depend on how fast its environment is."""
    flags = (*GAME, "--steps", "80", "--eval", "off")
    assert run(tmp_path / "whole", *flags, small=()).status == 0
    found = killed_at_moments(tmp_path / "run", *flags, moments=20, choose=random.Random(20))
    assert found == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--agent.environment", "nowhere.py:Game"), "agent.environment"),
        (("--agent.environment", "attachments.agents.tests.environments_under_test:Needing"), "'colour'"),
        (("--agent.environment", "profiles/environments/calculator.py:Calculator"), "tools"),
        (("--sampling.stop", '["x"]'), "sampling.stop"),
        (("--agent", "off"), "rewards.name"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags: tuple[str, ...], key: str, tmp_path: Path) -> None:
    """With the key, before anything is trained or written."""
    result = run(tmp_path / "run", *GAME, *flags, small=())
    assert result.status == 2
    assert key in result.err
    assert not (tmp_path / "run").exists()


def test_the_command_eval_evaluates_episodes(capfd: pytest.CaptureFixture[str]) -> None:
    """A greedy one and sampled ones of each problem, with the rewards of the environment and its tools."""
    assert main(["eval", "--profile", "calculator", "--limit", "16", "--samples", "2", "--json"]) == 0
    found = msgspec.json.decode(capfd.readouterr().out, type=Evaluation).policies["base"]
    assert found.reward is not None
    assert found.reward.value > 0, "the calls are read"
    assert found.rewards["environment"] == found.reward
    assert found.sampled_reward is not None
    assert found.pass_at.keys() == {"2"}


def test_the_command_eval_refuses_the_reward_of_an_environment_without_one(capfd: pytest.CaptureFixture[str]) -> None:
    """It names the key."""
    assert main(["eval", "--profile", "guessing", "--agent", "off", "--limit", "1"]) == 2
    assert "agent" in capfd.readouterr().err
