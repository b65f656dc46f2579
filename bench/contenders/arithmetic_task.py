"""The task of profile local-m3 for other trainers: its problems, rewards, accuracy measure and training clock.

Imports only the standard library and modules that every contender's environment has. The rules equal those of
`clotho.rewards` for problems whose answers are whole numbers or letters, which holds for all problems of this task.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.worker import busy_seconds
from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END, answer_text

POLICY = Path(__file__).resolve().parents[2] / "profiles" / "embedded"
MAX_TOKENS, RANK, SCALE = 96, 16, 2.0
FORMAT_WEIGHT, ANSWER_WEIGHT = 0.2, 1.0

FORMAT = re.compile(rf"\s*{THINK}(?P<thought>.*){THINK_END}\s*{ANSWER}(?P<answer>.*){ANSWER_END}\s*", re.DOTALL)
NUMBER = re.compile(r"[+-]?[0-9]+")
LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")


@dataclass(frozen=True)
class Problem:
    """One line of the dataset."""

    prompt: str
    answer: str


def read_problems(name: str) -> list[Problem]:
    """All problems of `train.jsonl` or `heldout.jsonl`, in file order."""
    lines = (POLICY / name).read_text(encoding="utf-8").splitlines()
    return [Problem(prompt=line["prompt"], answer=line["answer"]) for line in map(json.loads, lines)]


def has_format(completion: str) -> float:
    """1.0 for exactly one non-empty thought followed by one non-empty answer, otherwise 0.0."""
    match = FORMAT.fullmatch(completion)
    if match is None or any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return 0.0
    return float(bool(match["thought"].strip() and match["answer"].strip()))


def is_correct(completion: str, expected: str) -> float:
    """1.0 if the answer equals the number or the letter of the reference, otherwise 0.0."""
    found = answer_text(completion)
    if found is None:
        return 0.0
    if NUMBER.fullmatch(expected):
        return float(bool(NUMBER.fullmatch(found)) and int(found) == int(expected))
    letter = LETTER.fullmatch(found)
    return float(letter is not None and letter[1].upper() == expected)


def accuracy(completions: Sequence[str], problems: Sequence[Problem]) -> float:
    """The fraction of correct completions."""
    correct = [is_correct(text, problem.answer) for text, problem in zip(completions, problems, strict=True)]
    return sum(correct) / len(correct)


class TrainingEnded(Exception):
    """The target or the limit is reached; ends trainers that offer no other way to stop."""


@dataclass
class TrainingClock:
    """Measures training time without evaluation, and decides when training ends.

    evaluate: returns the held-out accuracy. target: stop at this accuracy, measured after every update; None: measure
    once at the end. updates: maximum number. limit: maximum processor seconds of training. loading: seconds from
    process start to the first update.
    """

    evaluate: Callable[[], float]
    target: float | None
    updates: int
    limit: float
    done: int = 0
    accuracy: float = 0.0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    loading: float | None = None
    _resumed: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """Start or continue the clock."""
        if self.loading is None:
            self.loading = busy_seconds()
        self._resumed = time.perf_counter(), time.process_time()

    def updated(self) -> None:
        """Record an update. Raises TrainingEnded after the last one."""
        self.seconds += time.perf_counter() - self._resumed[0]
        self.processor_seconds += time.process_time() - self._resumed[1]
        self.done += 1
        last = self.done >= self.updates or self.processor_seconds >= self.limit
        if last or self.target is not None:
            self.accuracy = self.evaluate()
        if last or (self.target is not None and self.accuracy >= self.target):
            raise TrainingEnded
        self.begin()

    def metrics(self) -> dict[str, float]:
        """All times, the final accuracy (below the target if it was not reached), and the number of updates."""
        return {
            "seconds": self.seconds,
            "from_command": (self.loading or 0.0) + self.seconds,
            "processor_seconds": self.processor_seconds,
            "accuracy": self.accuracy,
            "updates": float(self.done),
        }
