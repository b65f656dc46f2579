"""The task of profile local-m3 for trainers that are not ours: its problems, its rewards, its measure, and its clock.

Only the standard library and what any environment of a contender has is imported here. The rules are those of
`clotho.rewards` for problems whose answers are whole numbers or letters, which all of this task's are.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.loop import busy_seconds
from clotho.rewards.answer import ANSWER, ANSWER_END, THINK, THINK_END, answer_text

POLICY = Path(__file__).resolve().parents[2] / "profiles" / "embedded"
MAX_TOKENS, RANK, SCALE = 96, 16, 2.0
FORM_WEIGHT, ANSWER_WEIGHT = 0.2, 1.0

FORM = re.compile(rf"\s*{THINK}(?P<thought>.*){THINK_END}\s*{ANSWER}(?P<answer>.*){ANSWER_END}\s*", re.DOTALL)
NUMBER = re.compile(r"[+-]?[0-9]+")
LETTER = re.compile(r"\(?([A-Za-z])\)?[.):]?")


@dataclass(frozen=True)
class Question:
    """One line of the task's files."""

    prompt: str
    answer: str


def questions(name: str) -> list[Question]:
    """All problems of `train.jsonl` or `heldout.jsonl`, in the file's order."""
    lines = (POLICY / name).read_text(encoding="utf-8").splitlines()
    return [Question(prompt=line["prompt"], answer=line["answer"]) for line in map(json.loads, lines)]


def has_form(completion: str) -> float:
    """One thought with content, then one answer with content, and nothing else: 1.0, otherwise 0.0."""
    match = FORM.fullmatch(completion)
    if match is None or any(completion.count(tag) != 1 for tag in (THINK, THINK_END, ANSWER, ANSWER_END)):
        return 0.0
    return float(bool(match["thought"].strip() and match["answer"].strip()))


def is_right(completion: str, wanted: str) -> float:
    """The answer is the number, or the letter, of the reference: 1.0, otherwise 0.0."""
    given = answer_text(completion)
    if given is None:
        return 0.0
    if NUMBER.fullmatch(wanted):
        return float(bool(NUMBER.fullmatch(given)) and int(given) == int(wanted))
    letter = LETTER.fullmatch(given)
    return float(letter is not None and letter[1].upper() == wanted)


def accuracy(completions: Sequence[str], asked: Sequence[Question]) -> float:
    """The share of right completions."""
    right = [is_right(text, question.answer) for text, question in zip(completions, asked, strict=True)]
    return sum(right) / len(right)


class Over(Exception):
    """Training has reached its target or its limit; trainers that offer no other way out are left through it."""


@dataclass
class Course:
    """How far a trainer goes, and its own seconds on the way; measuring accuracy does not count.

    evaluate: held-out accuracy now. target: where to stop, looked for after every update; None: accuracy is measured
    once, at the end. updates: at most. limit: of processor seconds of training. loading: seconds from the start of the
    process to the beginning of training.
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
        """Say that training begins, or goes on."""
        if self.loading is None:
            self.loading = busy_seconds()
        self._resumed = time.perf_counter(), time.process_time()

    def updated(self) -> None:
        """Say that an update is done. Raises Over where it was the last one."""
        self.seconds += time.perf_counter() - self._resumed[0]
        self.processor_seconds += time.process_time() - self._resumed[1]
        self.done += 1
        last = self.done >= self.updates or self.processor_seconds >= self.limit
        if last or self.target is not None:
            self.accuracy = self.evaluate()
        if last or (self.target is not None and self.accuracy >= self.target):
            raise Over
        self.begin()

    def metrics(self) -> dict[str, float]:
        """All clocks, the accuracy at the end, which is below the target where that was not reached, and updates."""
        return {
            "seconds": self.seconds,
            "from_command": (self.loading or 0.0) + self.seconds,
            "processor_seconds": self.processor_seconds,
            "accuracy": self.accuracy,
            "updates": float(self.done),
        }
