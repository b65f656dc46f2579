"""The tasks that other trainers are measured on, by the profile of a case."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.contenders.arithmetic_task import ARITHMETIC, has_format, is_correct
from bench.contenders.shapes import REAL, REAL_DIRECTORY
from bench.contenders.training_task import Reward, TrainingTask, slowed
from bench.contenders.worker import Case

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
LAST_NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def is_right_sum(completion: str, expected: str) -> float:
    """1.0 if the last number of the completion is the reference, otherwise 0.0, by the rule of `math_eval`."""
    numbers = LAST_NUMBER.findall(completion)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == int(expected))


LEARN = "learn-m3"
RULES: dict[str, Reward] = {"format": has_format, "math_eval": is_correct, "choice_correctness": is_correct}
"""Rules by the name of the reward. One rule covers both kinds of answers, of which each reward judges one."""


def read_profile(name: str) -> dict[str, Any]:
    """The sections of a shipped profile on top of the profile that it extends."""
    own = tomllib.loads((PROFILES / f"{name}.toml").read_text(encoding="utf-8"))
    return _combined(read_profile(own["extends"]), own) if "extends" in own else own


def _combined(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = {key: _combined(base[key], own[key]) for key in own if isinstance(own[key], dict) and key in base}
    return base | own | both


def task_from(
    name: str, *, directory: Path, model: str, rewards: tuple[tuple[float, Reward], ...], correct: Reward
) -> TrainingTask:
    """A task with the problems, the system message, the token limit and the adapter of a profile."""
    profile = read_profile(name)
    adapter = {"rank": 16, "alpha": 32.0} | profile.get("policy", {}).get("method", {})
    return TrainingTask(
        model=model,
        directory=directory,
        problems=(PROFILES / profile["data"]["train"]).resolve().parent,
        system=profile["data"].get("system", ""),
        max_tokens=profile["sampling"]["max_tokens"],
        rank=adapter["rank"],
        scale=adapter.get("scale", adapter["alpha"] / adapter["rank"]),
        rewards=rewards,
        correct=correct,
    )


def addition() -> TrainingTask:
    """The task of profile smollm2. The model is in the directory that the environment variable names."""
    directory, rewards = Path(os.environ[REAL_DIRECTORY]), ((1.0, is_right_sum),)
    return task_from("smollm2", directory=directory, model=REAL, rewards=rewards, correct=is_right_sum)


def learning() -> TrainingTask:
    """The task of profile learn-m3."""
    profile = read_profile(LEARN)
    directory = (PROFILES / profile["model"]["path"]).resolve()
    weights = {RULES[reward["name"]]: float(reward.get("weight", 1.0)) for reward in profile["rewards"]}
    rewards = tuple((weight, rule) for rule, weight in weights.items())
    return task_from(LEARN, directory=directory, model=str(directory), rewards=rewards, correct=is_correct)


TASKS: dict[str, Callable[[], TrainingTask]] = {
    "arithmetic": lambda: ARITHMETIC,
    "smollm2": addition,
    "learn": learning,
    "learn-slow-rewards": learning,
}


def task_of(case: Case) -> TrainingTask:
    """The task of the case's profile. `reward_seconds`: time to rate a completion."""
    task = TASKS[case["profile"]]()
    return slowed(task, case["reward_seconds"]) if case.get("reward_seconds") else task
