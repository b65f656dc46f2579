"""The profile `gsm8k`: what it reads from a record of GSM8K, and what it rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clotho.rewards.registry import RewardOptions, load_reward
from protocols.prompt import Problem
from training_run.groups.prompts import read_split
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile

RECORD = {
    "question": "Ann has 12 boxes of 6 eggs, and sells 20 eggs. How many eggs are left?",
    "answer": "She has 12 * 6 = <<12*6=72>>72 eggs.\nAfter the sale 72 - 20 = <<72-20=52>>52 are left.\n#### 52",
}
"""A record in the form of GSM8K: a worked answer whose result stands behind ####."""


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    """Return the profile with files in the place of the dataset of the hub."""
    for name in ("train", "heldout"):
        record = {**RECORD, "question": f"{RECORD['question']} ({name})"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    files = {f"data.{name}": str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")}
    return load_profile("gsm8k", {**files, "data.subset": "", "data.heldout_split": ""})


def problem_of(profile: Profile) -> Problem:
    """Return the problem for training."""
    return read_split(profile).train[0]


def test_the_answer_is_the_number_behind_the_marks(profile: Profile) -> None:
    """The worked answer of the record is not part of it."""
    assert problem_of(profile).answer == "52"


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("12 * 6 is 72, less 20 is 52.\n#### 52", 1.0),
        ("12 * 6 is 72.\n#### 52.0", 1.0),
        ("12 * 6 is 72.\n#### 72", 0.0),
        ("The result is 52.", 0.0),
    ],
)
def test_a_completion_is_correct_if_the_number_behind_its_marks_is(
    completion: str, reward: float, profile: Profile
) -> None:
    """As the system message asks for it."""
    (section,) = profile.rewards
    assert load_reward(section.name, RewardOptions(answer_in="hashes"))(problem_of(profile), completion) == reward
