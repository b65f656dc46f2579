"""`gym`: one run per dataset and seed, each measured once, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from attachments.reasoning_gym.sections import TABLES
from bench import gym
from bench.runs import Record
from training_run.profile.flags import parse_arguments
from training_run.profile.load import load_profile

STEP = {"step": 1, "policy_version": 30, "time/run": 9.0, "time/update": 1.0, "time/wait_for_rollouts": 2.0}
RECORD = Record(
    metrics=[STEP],
    log=[],
    profile={},
    launched=0.0,
    evaluations=[{"step": 0, "accuracy": 0.2}, {"step": 1, "accuracy": 0.7}],
)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replaces training by `RECORD`, and records the flags of every run."""
    found: list[list[str]] = []

    def run(arguments: Sequence[str]) -> Record:
        found.append(list(arguments))
        return RECORD

    monkeypatch.setattr(gym, "run_pipeline", run)
    return found


def test_a_run_with_results_is_not_repeated(tmp_path: Path, runs: list[list[str]]) -> None:
    """An interrupted measurement continues with what is missing. Other settings replace the results of a run."""
    out = tmp_path / "gym.jsonl"
    name = next(iter(gym.TASKS))
    for _ in range(2):
        assert gym.main(["--datasets", name, "--seeds", "0", "1", "--out", str(out)]) == 0
    assert len(runs) == 2
    assert gym.main(["--datasets", name, "--seeds", "1", "--again", "--out", str(out)]) == 0
    assert gym.main(["--datasets", name, "--seeds", "0", "--steps", "3", "--out", str(out)]) == 0
    assert len(runs) == 4
    assert sorted((run.seed, run.before, run.after) for run in gym.read(out)) == [(0, 0.2, 0.7), (1, 0.2, 0.7)]


def test_the_table_has_one_row_per_dataset(tmp_path: Path, runs: list[list[str]]) -> None:
    """With the settings that make it easy."""
    out = tmp_path / "gym.jsonl"
    gym.main(["--out", str(out)])
    heading, rule, *rows = [line for line in gym.table(gym.read(out)).splitlines() if line.startswith("|")]
    assert len(rows) == len(gym.TASKS) == len(runs)
    assert {line.count("|") for line in (rule, *rows)} == {heading.count("|")}
    assert all("+0.50" in row for row in rows)


@pytest.mark.parametrize("dataset", gym.TASKS)
def test_the_flags_of_every_run_are_valid(dataset: str) -> None:
    """The dataset, its settings and its reward replace those of the profile."""
    words = ["--profile", gym.PROFILE, *gym.TASKS[dataset].arguments(dataset)]
    arguments = parse_arguments(words)
    profile = load_profile(arguments.profile, arguments.overrides)
    assert profile.data.train == f"reasoning_gym:{dataset}"
    assert [table.dataset for table in TABLES.of(profile.data)] == [dataset]
    assert [reward.name for reward in profile.rewards] == ["reasoning_gym"]
