"""A monitor with files in a directory, and a clock of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anyio import create_task_group, fail_after

from actors.monitor import Monitor
from clotho.monitoring.display import Display, NoDisplay, RunView
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.storage.jsonl_writer import LineWriter
from protocols.evaluation import EvalReport
from protocols.step import GroupsEnded, StepReport
from tests.monitoring.examples import GAUGES


class Clock:
    """Seconds that pass only when somebody looks: half a second each time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


class Remembering(NoDisplay):
    """A display that keeps what it was shown."""

    def __init__(self) -> None:
        self.views: list[RunView] = []

    def show(self, view: RunView) -> None:
        self.views.append(view)


def strict(text: bytes) -> Any:
    """Parse JSON as others do: NaN and Infinity are none."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file."""
    return [strict(line) for line in path.read_bytes().splitlines()]


async def observe(
    directory: Path, *reports: StepReport | GroupsEnded | EvalReport, display: Display | None = None, **options: Any
) -> None:
    """Run a monitor over some reports, sent through a mailbox smaller than they are many."""
    mailbox = Queue[StepReport | GroupsEnded | EvalReport]("reports", capacity=1)
    writer = mailbox.writer()
    rollouts = LineWriter(directory / "rollouts.jsonl")
    monitor = Monitor(
        inbox=mailbox.reader(),
        gauges=options.pop("gauges", lambda: GAUGES),
        display=display or NoDisplay(),
        metrics=LineWriter(directory / "metrics.jsonl"),
        rollouts=rollouts,
        recorded=options.pop("recorded", None) or Latest[int]("recorded"),
        clock=Clock(),
        **options,
    )
    with fail_after(10):
        async with create_task_group() as group:
            group.start_soon(monitor.run)
            async with writer:
                for report in reports:
                    await writer.send(report)
