"""A training task for other trainers: its problems, rewards and accuracy measure, and the clock of a training run.

Imports only the standard library and modules that every contender's environment has.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.contenders.worker import busy_seconds

Reward = Callable[[str, str], float]
"""Rates a completion, given the correct answer."""


@dataclass(frozen=True)
class Problem:
    """One line of the dataset."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class TrainingTask:
    """What a profile trains: the model, its adapter, the problems and the rewards.

    model: name in `bench.contenders.shapes`. directory: of the model's tokenizer. problems: directory of the dataset.
    system: system message, or "". rewards: weight and function. correct: decides whether an answer counts as correct.
    """

    model: str
    directory: Path
    problems: Path
    system: str
    max_tokens: int
    rank: int
    scale: float
    rewards: tuple[tuple[float, Reward], ...]
    correct: Reward

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """The conversation that asks a problem."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        return [*before, {"role": "user", "content": problem.prompt}]

    def training(self) -> list[Problem]:
        """All problems for training, in file order."""
        return read_problems(self.problems / "train.jsonl")

    def held_out(self) -> list[Problem]:
        """All held-out problems, in file order."""
        return read_problems(self.problems / "heldout.jsonl")

    def accuracy(self, completions: Sequence[str], problems: Sequence[Problem]) -> float:
        """The fraction of correct completions."""
        correct = [self.correct(text, problem.answer) for text, problem in zip(completions, problems, strict=True)]
        return sum(correct) / len(correct)


def read_problems(path: Path) -> list[Problem]:
    """All problems of a file, in file order."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Problem(prompt=line["prompt"], answer=line["answer"]) for line in map(json.loads, lines)]


def slowed(task: TrainingTask, seconds: float) -> TrainingTask:
    """The same task with a first reward that takes `seconds` per completion, like a remote judge."""
    (weight, rate), *others = task.rewards

    def slow(completion: str, expected: str) -> float:
        time.sleep(seconds)
        return rate(completion, expected)

    return replace(task, rewards=((weight, slow), *others))


class TrainingEnded(Exception):
    """The target or the limit is reached; ends trainers that offer no other way to stop."""


@dataclass
class TrainingClock:
    """Measures training time without evaluation, and decides when training ends.

    evaluate: returns the held-out accuracy; None: accuracy is not measured. target: stop at this accuracy, measured
    after every `interval` updates; None: measure once at the end. updates: maximum number. limit, limit_seconds:
    maximum processor seconds and seconds of training. floor: stop below this accuracy. loading: seconds from process
    start to the first update.
    """

    evaluate: Callable[[], float] | None
    target: float | None
    updates: int
    limit: float
    limit_seconds: float = math.inf
    interval: int = 1
    floor: float = 0.0
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
        late = self.processor_seconds >= self.limit or self.seconds >= self.limit_seconds
        last = self.done >= self.updates or late
        due = last or (self.target is not None and self.done % self.interval == 0)
        if self.evaluate is not None and due:
            self.accuracy = self.evaluate()
        if last or (due and self.target is not None and not self.floor <= self.accuracy < self.target):
            raise TrainingEnded
        self.begin()

    def metrics(self) -> dict[str, float]:
        """All times, the final accuracy (below the target if it was not reached), and the number of updates."""
        accuracy = {"accuracy": self.accuracy} if self.evaluate is not None else {}
        return {
            "seconds": self.seconds,
            "from_command": (self.loading or 0.0) + self.seconds,
            "processor_seconds": self.processor_seconds,
            "updates": float(self.done),
            **accuracy,
        }
