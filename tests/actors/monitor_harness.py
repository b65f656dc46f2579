"""Runs a monitor over reports, with files in a directory and a simulated clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anyio import create_task_group, fail_after

from actors.monitor import Monitor
from protocols.evaluation import EvalReport
from protocols.step import LearnerReport
from tests.training_run.records.display_examples import GAUGES
from training_run.directory.jsonl import JsonlWriter
from training_run.records.display import Display, RunView
from training_run.records.findings import RunFindings
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue


class Clock:
    """A clock that advances by half a second with every call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


class RecordingDisplay(Display):
    """A display that keeps all views."""

    def __init__(self) -> None:
        self.views: list[RunView] = []

    def show(self, view: RunView) -> None:
        self.views.append(view)


def strict_json(text: bytes) -> Any:
    """Parse JSON without the extensions NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return all records of a JSON Lines file."""
    return [strict_json(line) for line in path.read_bytes().splitlines()]


async def observe(
    directory: Path, *reports: LearnerReport | EvalReport, display: Display | None = None, **options: Any
) -> None:
    """Run a monitor over reports that are sent through a queue of capacity 1."""
    queue = Queue[LearnerReport | EvalReport]("reports", capacity=1)
    writer = queue.outbox()
    rollouts = JsonlWriter(directory / "rollouts.jsonl")
    monitor = Monitor(
        inbox=queue.inbox(),
        gauges=options.pop("gauges", lambda: GAUGES),
        display=display or Display(),
        metrics=JsonlWriter(directory / "metrics.jsonl"),
        evaluations=JsonlWriter(directory / "evaluations.jsonl"),
        rollouts=rollouts,
        logged=options.pop("logged", None) or Latest[int]("logged"),
        findings=RunFindings({}),
        clock=Clock(),
        **options,
    )
    with fail_after(10):
        async with create_task_group() as group:
            group.start_soon(monitor.run)
            async with writer:
                for report in reports:
                    await writer.send(report)
