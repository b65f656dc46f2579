"""A measured number: whose, of what, in which case, and where; and the files of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint

RESULTS = ROOT / "bench" / "results"


class Measurement(Struct, frozen=True, kw_only=True):
    """One metric of one contender in one case.

    case: what was varied, by name, such as {"model": "6m", "group": 8}. values: one per repeat, warm-up left out, in
    order: where contenders were run by turns, values of equal index were measured one after the other, so ratios are
    taken pair by pair. unit: of the values. better: which direction is an improvement. semantics: what the contender's
    number means. versions: of what the contender runs on. command: makes the file again.
    """

    question: str
    case: dict[str, str | int | float]
    contender: str
    metric: str
    unit: str
    better: Literal["higher", "lower"]
    values: list[float]
    semantics: str
    versions: dict[str, str]
    command: str
    fingerprint: Fingerprint

    @property
    def median(self) -> float:
        """The middle of the values."""
        return statistics.median(self.values)


def ratios(ours: Measurement, theirs: Measurement) -> list[float]:
    """Ours to theirs, pair by pair. Raises ValueError where they are not of one metric, case and number of repeats."""
    same = (ours.question, ours.metric, ours.case) == (theirs.question, theirs.metric, theirs.case)
    if not same or len(ours.values) != len(theirs.values):
        raise ValueError(f"{ours.contender} and {theirs.contender} were not measured in pairs: {ours.metric}")
    return [a / b for a, b in zip(ours.values, theirs.values, strict=True)]


def results_path(question: str) -> Path:
    """Where a question's results are kept."""
    return RESULTS / f"{question}.jsonl"


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Replace a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in measurements))


def read(path: Path) -> Sequence[Measurement]:
    """All results of a file; none where there is no file. Raises msgspec.MsgspecError for lines of another form."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Measurement) for line in path.read_bytes().splitlines()]
