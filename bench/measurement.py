"""One measured number with its contender, case, machine and command; reading and writing of results files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from bench.fingerprint import ROOT, Fingerprint

RESULTS = ROOT / "bench" / "results"


Case = dict[str, str | int | float]
"""Settings that vary, by name."""


class Metric(Struct, frozen=True, kw_only=True):
    """What is measured."""

    name: str
    unit: str
    better: Literal["higher", "lower"]


class Measurement(Struct, frozen=True, kw_only=True):
    """One metric of one contender in one case.

    question: name of the benchmark. case: the settings that vary, such as {"model": "6m", "group": 8}. values: one per
    repeat, in order, without warmup. Contenders alternate, so values of equal index were measured one after the other,
    and ratios are taken pair by pair. unit: of the values. better: the direction of an improvement. semantics: what the
    number means. versions: of the packages that the contender runs on. command: reproduces the results file.
    """

    question: str
    case: Case
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
        """Median of the values."""
        return statistics.median(self.values)


def measured(
    question: str,
    case: Case,
    contender: str,
    metric: Metric,
    values: Sequence[float],
    here: Fingerprint,
    *,
    semantics: str,
    versions: dict[str, str] | None = None,
) -> Measurement:
    """A measurement of the benchmark `question`. versions: by default that of MLX."""
    return Measurement(
        question=question,
        case=dict(case),
        contender=contender,
        metric=metric.name,
        unit=metric.unit,
        better=metric.better,
        values=list(values),
        semantics=semantics,
        versions={"mlx": here.machine.mlx_version} if versions is None else versions,
        command=f"python -m bench {question}",
        fingerprint=here,
    )


def ratios(ours: Measurement, theirs: Measurement) -> list[float]:
    """Ratios of our values to theirs, pair by pair. Raises ValueError if metric, case or number of repeats differ."""
    same = (ours.question, ours.metric, ours.case) == (theirs.question, theirs.metric, theirs.case)
    if not same or len(ours.values) != len(theirs.values):
        raise ValueError(f"{ours.contender} and {theirs.contender} were not measured in pairs: {ours.metric}")
    return [a / b for a, b in zip(ours.values, theirs.values, strict=True)]


def results_path(question: str) -> Path:
    """Path of the results file of a benchmark."""
    return RESULTS / f"{question}.jsonl"


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Replace a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in measurements))


def read(path: Path) -> Sequence[Measurement]:
    """Read all results of a file; an empty list if it does not exist. Raises msgspec.MsgspecError for other formats."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Measurement) for line in path.read_bytes().splitlines()]
