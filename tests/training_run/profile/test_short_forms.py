"""The short form `train OBJECTIVE` of a command line."""

from __future__ import annotations

import pytest

from protocols.errors import ProfileError
from training_run.profile.short_forms import spelled_out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train sft --dataset d.jsonl", "--learner.objective sft --rewards [] --dataset d.jsonl"),
        ("train dpo --dataset d.jsonl", "--learner.objective dpo --rewards [] --dataset d.jsonl"),
        ("train sft --profile mine.toml", "--learner.objective sft --profile mine.toml"),
        ("train dpo --preference.pairs=rewards", "--learner.objective dpo --preference.pairs=rewards"),
        ("train grpo --steps 3", "--learner.objective grpo --steps 3"),
        ("--steps 3", "--steps 3"),
        (
            "train distill --teacher big --dataset d.jsonl",
            "--learner.distillation-weight 1 --rewards [] --distillation.teacher big --dataset d.jsonl",
        ),
        (
            "train distill --teacher=@policy",
            "--learner.distillation-weight 1 --distillation.teacher=@policy",
        ),
        (
            "train distill --teacher big --learner.distillation-weight 0.5 --rewards exact",
            "--distillation.teacher big --learner.distillation-weight 0.5 --rewards exact",
        ),
        (
            "train distill --distillation.teacher big --distillation.beside-rewards true",
            "--learner.distillation-weight 1 --distillation.teacher big --distillation.beside-rewards true",
        ),
        ("train distill --profile mine.toml", "--learner.distillation-weight 1 --profile mine.toml"),
    ],
)
def test_train_names_the_objective(line: str, words: str) -> None:
    """What learns a dataset needs no rewards: those of the default profile are left out."""
    assert spelled_out(line.split()) == words.split()


def test_distillation_needs_a_teacher() -> None:
    """Or a profile that names one."""
    with pytest.raises(ProfileError, match="--teacher"):
        spelled_out(["train", "distill", "--steps", "3"])


@pytest.mark.parametrize("line", ["train", "train --steps 3", "train dpoo", "train custom"])
def test_train_without_an_objective_is_refused(line: str) -> None:
    """With the objectives there are, or the nearest one."""
    with pytest.raises(ProfileError, match="is no objective"):
        spelled_out(line.split())
