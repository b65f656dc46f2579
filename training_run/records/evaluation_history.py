"""Evaluations of a run in evaluations.jsonl, and what a resumed run reads from its histories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from protocols import descriptions
from protocols.errors import RunDirectoryError, visible
from protocols.evaluation import EvalReport

EVALUATION_METRICS = descriptions(EvalReport)
"""Every key of evaluations.jsonl."""


class RunHistory(Struct, frozen=True, kw_only=True):
    """What the earlier processes of a run recorded, and the evaluations since.

    seconds: age of the run at the start. evaluations: all evaluations until then, oldest first. before: evaluation of
    the base policy; after: the newest evaluation with `final`; None if there is none. reports: of the evaluator, since
    the start.
    """

    seconds: float
    evaluations: tuple[EvalReport, ...] = ()
    before: EvalReport | None
    after: EvalReport | None
    reports: list[EvalReport] = msgspec.field(default_factory=list)


class MetricsRecord(Struct, frozen=True, kw_only=True):
    """The keys of metrics.jsonl that a resumed run reads."""

    step: int
    seconds: float = msgspec.field(name="time/run", default=0.0)


def read_history(metrics: Path, evaluations: Path) -> RunHistory:
    """Read the history of a run from metrics.jsonl and evaluations.jsonl. Missing files mean a new run.

    Raises RunDirectoryError if a line is not valid.
    """
    try:
        reports = [msgspec.json.decode(line, type=EvalReport) for line in _lines(evaluations)]
        age = max((msgspec.json.decode(line, type=MetricsRecord).seconds for line in _lines(metrics)), default=0.0)
    except ValueError as error:
        raise RunDirectoryError(f"{metrics} or {evaluations.name} is not valid: {visible(str(error), 200)}") from error
    return RunHistory(
        seconds=max([age, *(report.run_seconds for report in reports)]),
        evaluations=tuple(reports),
        before=next((report for report in reports if report.step == 0 and not report.final), None),
        after=next((report for report in reversed(reports) if report.final), None),
    )


def read_evaluations(evaluations: Path) -> tuple[EvalReport, ...]:
    """Return the lines of evaluations.jsonl, without lines that are not valid."""
    found = []
    with suppress(OSError):
        for line in _lines(evaluations):
            with suppress(ValueError):
                found.append(msgspec.json.decode(line, type=EvalReport))
    return tuple(found)


def evaluated_steps(evaluations: Path, *, until: int) -> tuple[int, ...]:
    """Return the step of each valid line of evaluations.jsonl up to the step `until`."""
    return tuple(report.step for report in read_evaluations(evaluations) if report.step <= until)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, one at a time: the metrics of a long run have hundreds of megabytes."""
    if path.exists():
        with path.open("rb") as file:
            yield from file
