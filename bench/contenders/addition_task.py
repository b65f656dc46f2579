"""The task of profile smollm2 for other trainers, with the rule of `math_eval` for the last number."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

from bench.contenders.shapes import REAL, REAL_DIRECTORY
from bench.contenders.training_task import TrainingTask

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def is_correct(completion: str, expected: str) -> float:
    """1.0 if the last number of the completion is the reference, otherwise 0.0."""
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == int(expected))


def addition() -> TrainingTask:
    """The task, read from the profile. The model is in the directory that the environment variable names."""
    profile = tomllib.loads((PROFILES / "smollm2.toml").read_text(encoding="utf-8"))
    return TrainingTask(
        model=REAL,
        directory=Path(os.environ[REAL_DIRECTORY]),
        problems=PROFILES / "smollm2",
        system=profile["data"].get("system", ""),
        max_tokens=profile["sampling"]["max_tokens"],
        rank=profile["policy"]["method"]["rank"],
        scale=profile["policy"]["method"]["scale"],
        rewards=((1.0, is_correct),),
        correct=is_correct,
    )
