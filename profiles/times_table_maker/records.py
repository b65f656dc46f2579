"""What was measured about the policy: the records beside its weights, from which the card is written."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

POLICY_RECORD, RUNS = "policy.json", "runs.jsonl"
"""Names of the two files of records."""

TARGET = 0.8
"""Accuracy at which a run counts as having learned the task."""


class PolicyRecord(Struct, frozen=True, kw_only=True):
    """What the maker measured. Accuracies are shares of the held-out problems, by kind and under `all`."""

    parameters: int
    layers: int
    width: int
    vocabulary: int
    seed: int
    updates: int
    """Updates of supervised learning, for the policy and for the ceiling."""
    batch_size: int
    seconds: float
    """Duration of the training of the policy."""
    count: int
    """Number of held-out problems."""
    mean_tokens: float
    """Mean length of a sampled completion."""
    greedy: dict[str, float]
    sampled: dict[str, float]
    """At temperature 1."""
    passed: dict[str, float]
    """At least one of 8 samples is right."""
    ceiling: dict[str, float]
    """Greedy accuracy of a policy that learned every product by supervised learning."""


class RunRecord(Struct, frozen=True, kw_only=True):
    """One run of `learn-m3`. changes: flags that differ from the profile. accuracy: (update, greedy accuracy) pairs."""

    changes: str
    seed: int
    accuracy: list[tuple[int, float]]
    seconds: float
    load: float
    """Mean number of runnable processes in the last minute of the run."""

    @property
    def updates_to_target(self) -> int | None:
        """The first evaluated update with `TARGET` or more; None if there is none."""
        return next((update for update, accuracy in self.accuracy if accuracy >= TARGET), None)

    @property
    def final(self) -> float:
        """Accuracy after the last update."""
        return self.accuracy[-1][1]


def write_policy_record(directory: Path, record: PolicyRecord) -> None:
    """Write what the maker measured."""
    (directory / POLICY_RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read_policy_record(directory: Path) -> PolicyRecord:
    """Read what the maker measured."""
    return msgspec.json.decode((directory / POLICY_RECORD).read_bytes(), type=PolicyRecord)


def read_runs(directory: Path) -> list[RunRecord]:
    """Read the measured runs; an empty list if there are none."""
    path = directory / RUNS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=RunRecord) for line in lines]


def add_run(directory: Path, run: RunRecord) -> None:
    """Write a run, in place of an earlier one with the same changes and seed."""
    others = [one for one in read_runs(directory) if (one.changes, one.seed) != (run.changes, run.seed)]
    runs = sorted([*others, run], key=lambda one: (one.changes, one.seed))
    (directory / RUNS).write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in runs))
