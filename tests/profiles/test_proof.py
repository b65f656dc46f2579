"""The problems, demonstrations and rewards of the profiles `proof-reverse-text` and `proof-countdown`."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attachments.stages.sections import STAGES
from bench.studies.proof import DEMONSTRATED, TASKS
from clotho.rewards.registry import RewardOptions, load_reward
from profiles.countdown.__main__ import solutions
from profiles.countdown.reward import solved
from profiles.reverse_text.reward import similarity
from protocols.prompt import Problem
from training_run.profile.load import load_profile

PROFILES = Path(__file__).parents[2] / "profiles"
FOLDERS = [name.replace("-", "_") for name in TASKS]


def records(folder: str, name: str) -> list[dict[str, Any]]:
    """Read a shipped file."""
    return [json.loads(line) for line in (PROFILES / folder / name).read_text(encoding="utf-8").splitlines()]


def numbers(record: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a problem of Countdown, sorted."""
    return tuple(sorted(map(int, re.findall(r"\d+", record["prompt"])[:-1])))


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_of_a_task_can_be_made_again(folder: str, tmp_path: Path) -> None:
    """Byte for byte, with the default seed."""
    import_module(f"profiles.{folder}.__main__").make(tmp_path, 0)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (PROFILES / folder / name).read_bytes()


def test_no_held_out_problem_is_trained() -> None:
    """No text occurs twice, and no three numbers are in both files, whatever their order and target."""
    texts = [one["prompt"] for name in ("train.jsonl", "heldout.jsonl") for one in records("reverse_text", name)]
    assert len(set(texts)) == len(texts) == 1024 + 128
    trained, held_out = ([*map(numbers, records("countdown", name))] for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(trained), len(held_out)) == (1024, 128)
    assert not {*trained} & {*held_out}


def test_the_chance_of_countdown_is_that_of_its_card() -> None:
    """Of the seven choices of signs with a number that is added, on average over the held-out problems."""
    held_out = records("countdown", "heldout.jsonl")
    found = [solutions(numbers(one), int(one["prompt"].split()[-1])) for one in held_out]
    chance = sum(map(len, found)) / (7 * len(held_out))
    assert f"| {chance:.2f}:" in (PROFILES.parent / "docs" / "known-tasks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_earn_every_reward(task: str) -> None:
    """So do the answers of held-out problems, which makes 1 the ceiling of the accuracy."""
    profile, folder = load_profile(f"proof-{task}"), task.replace("-", "_")
    rewards = [load_reward(one.name, RewardOptions(answer_in=one.answer_in or "tags")) for one in profile.rewards]
    found = [*records(folder, "train.jsonl"), *records(folder, "heldout.jsonl")]
    for one in found:
        problem = Problem(prompt=one["prompt"], answer=one["answer"])
        completion = one.get("completion", f"#### {one['answer']}" if task == "countdown" else one["answer"])
        assert all(reward(problem, completion) == 1.0 for reward in rewards)


@pytest.mark.parametrize("task", TASKS)
def test_the_stages_are_those_of_the_study(task: str) -> None:
    """Its table reads the accuracy after the demonstrations at their last step."""
    assert [(one.kind, one.steps) for one in STAGES.of(load_profile(f"proof-{task}"))] == [
        ("sft", DEMONSTRATED),
        ("rl", 40),
    ]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("#### 7+12-3", 1.0),
        ("steps #### (12 - 3) + 7", 1.0),
        ("#### 12*7/3", 0.1),
        ("7+12-3", 0.0),
        ("#### 7+12", 0.0),
        ("#### 7+12-3-3", 0.0),
        ("#### 12/(7-7)-3", 0.0),
        ("#### 3**7**12", 0.0),
        ("#### print(3, 7, 12)", 0.0),
        ("#### 3+7+", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_rewards_expressions_of_all_numbers(completion: str, reward: float) -> None:
    """Each number is used once, with + - * / and parentheses; nothing else is evaluated."""
    assert solved(Problem(prompt="3, 7, 12; target 16"), completion) == reward


def test_countdown_rewards_no_division_by_zero() -> None:
    """It is no expression with a value."""
    assert solved(Problem(prompt="3, 7, 7; target 3"), "#### 3/(7-7)") == 0.0


def test_all_sums_and_differences_with_the_value_are_solutions() -> None:
    """Equal numbers give one solution for each choice of what is subtracted."""
    assert solutions((3, 7, 12), 16) == ["7+12-3"]
    assert solutions((5, 13, 5), 13) == ["5+13-5", "13+5-5"]
    assert solutions((1, 2, 3), 7) == []


@pytest.mark.parametrize(
    ("completion", "value"), [("ib ir", 1.0), (" ib ir\n", 1.0), ("ib", 4 / 7), ("xyz", 0.0), ("", 0.0)]
)
def test_the_reward_of_a_reversed_text_is_its_similarity(completion: str, value: float) -> None:
    """Twice the matching characters, divided by the characters of both texts."""
    assert similarity(Problem(prompt="ri bi", answer="ib ir"), completion) == pytest.approx(value)
