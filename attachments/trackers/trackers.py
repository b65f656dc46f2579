"""Experiment trackers (wandb, trackio, TensorBoard): the metrics, evaluations, completions and warnings of a run.

Each tracker has a thread of its own behind a bounded queue. A tracker that fails, hangs or is slow loses records and
never delays the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
from msgspec import Struct

from attachments.trackers.sections import TrackerSection
from protocols.errors import ProfileError, visible
from protocols.evaluation import EvalReport
from protocols.step import StepReport
from training_run.profile.schema import TrackingSection
from training_run.records.terminal_text import terminal_text

log = structlog.get_logger(actor="monitor")

PROJECT = "clotho"

CAPACITY = 256
"""Number of records that wait for a tracker."""

CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a tracker."""

COLUMNS = ("step", "type", "prompt", "completion", "reward")

MAX_TEXT = 2000
"""Characters of a prompt or a completion in a table."""


class TrackedRun(Struct, frozen=True, kw_only=True):
    """A run as trackers name it. id: identifier of the run. settings: the resolved profile without API keys."""

    id: str
    name: str
    directory: Path
    settings: Mapping[str, Any]


class Values(Struct, frozen=True, kw_only=True):
    """Numbers of one step, by name."""

    step: int
    values: Mapping[str, float]


class Completions(Struct, frozen=True, kw_only=True):
    """A table of completions of one step; the columns are `COLUMNS`."""

    step: int
    rows: tuple[tuple[Any, ...], ...]


class Warned(Struct, frozen=True, kw_only=True):
    """A warning of the run."""

    step: int
    text: str


Record = Values | Completions | Warned


class Backend(Protocol):
    """The library of one tracker. All methods run in the thread of the tracker."""

    def write(self, record: Record) -> None:
        """Write one record."""

    def close(self) -> None:
        """Finish the run of the tracker."""


class WandbBackend:
    """Weights & Biases. A resumed run continues its run."""

    def __init__(self, tracking: TrackingSection, section: TrackerSection, run: TrackedRun) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=tracking.project or PROJECT,
            group=tracking.group or None,
            name=tracking.run_name or run.name,
            tags=list(tracking.tags) or None,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            mode=None if section.mode == "auto" else section.mode,
            config=dict(run.settings),
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._step = 0

    def write(self, record: Record) -> None:
        """Write one record. wandb accepts no step before the newest, so a late evaluation belongs to the newest."""
        self._step = step = max(self._step, record.step)
        match record:
            case Values():
                self._run.log(dict(record.values), step=step)
            case Completions():
                table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in record.rows])
                self._run.log({"completions": table}, step=step)
            case Warned():
                self._run.alert(title="Clotho", text=record.text)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioBackend:
    """trackio, which stores runs on this machine."""

    def __init__(self, tracking: TrackingSection, section: TrackerSection, run: TrackedRun) -> None:
        del section
        self._trackio: Any = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=tracking.project or PROJECT,
            group=tracking.group or None,
            name=tracking.run_name or f"{run.name}-{run.id[:8]}",
            config=dict(run.settings) | {"tags": list(tracking.tags)},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Record) -> None:
        """Write one record."""
        match record:
            case Values():
                self._run.log(dict(record.values), step=record.step)
            case Completions():
                text = "\n\n".join(" | ".join(map(str, row)) for row in record.rows)
                self._run.log({"completions": self._trackio.Markdown(text)}, step=record.step)
            case Warned():
                self._run.log({"warning": self._trackio.Markdown(record.text)}, step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TensorBoardBackend:
    """TensorBoard event files in `RUN_DIR/tensorboard`."""

    def __init__(self, tracking: TrackingSection, section: TrackerSection, run: TrackedRun) -> None:
        del section
        library: Any = importlib.import_module("tensorboardX")
        self._writer = library.SummaryWriter(str(run.directory / "tensorboard"), flush_secs=10)
        self._writer.add_text("profile", f"```\n{run.settings}\n```", 0)
        names = (tracking.project or PROJECT, tracking.group, tracking.run_name or run.name, *tracking.tags)
        self._writer.add_text("run", " ".join(filter(None, names)), 0)

    def write(self, record: Record) -> None:
        """Write one record."""
        match record:
            case Values():
                for name, value in record.values.items():
                    self._writer.add_scalar(name, value, record.step)
            case Completions():
                lines = ["| " + " | ".join(str(part).replace("|", "\\|") for part in row) + " |" for row in record.rows]
                head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
                self._writer.add_text("completions", "\n".join([head, *lines]), record.step)
            case Warned():
                self._writer.add_text("warnings", record.text, record.step)

    def close(self) -> None:
        """Write everything to the files."""
        self._writer.close()


Opener = Callable[[TrackingSection, TrackerSection, TrackedRun], Backend]

BACKENDS: Mapping[str, tuple[str, Opener]] = {
    "wandb": ("wandb", WandbBackend),
    "trackio": ("trackio", TrackioBackend),
    "tensorboard": ("tensorboardX", TensorBoardBackend),
}
"""Of each tracker, the module that it needs, and its backend."""


class Tracker:
    """One tracker and its thread. `put` and `close` never raise; `put` never waits.

    completions: number of completions in the table of a step.
    """

    def __init__(
        self, name: str, opener: Callable[[], Backend], *, completions: int = 0, close_seconds: float = CLOSE_SECONDS
    ) -> None:
        """opener: opens the tracker, in its thread. close_seconds: how long `close` waits."""
        self.name, self.completions = name, completions
        self._opener, self._close_seconds = opener, close_seconds
        self._records = queue.Queue[Record | None](CAPACITY)
        self._lost, self._failed = 0, False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Pass a record on; it is lost if the queue is full or the tracker has failed."""
        if self._failed:
            return
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                log.warning("tracker_is_slow", tracker=self.name, effect="records of this tracker are lost")

    def close(self) -> None:
        """Write the waiting records and finish, for at most `close_seconds`."""
        with suppress(queue.Full):
            self._records.put(None, timeout=self._close_seconds)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            log.warning("tracker_abandoned", tracker=self.name, seconds=self._close_seconds)
        elif self._lost:
            log.warning("tracker_lost_records", tracker=self.name, records=self._lost)

    def _work(self) -> None:
        try:
            backend = self._opener()
            while (record := self._records.get()) is not None:
                backend.write(record)
            backend.close()
        except Exception as error:  # a library of someone else, with a network behind it
            self._failed = True
            text = visible(" ".join(str(error).split()), 200)
            log.warning("tracker_failed", tracker=self.name, error=f"{type(error).__name__}: {text}")


def close_trackers(trackers: Sequence[Tracker]) -> None:
    """Close all trackers at the same time."""
    closing = [threading.Thread(target=tracker.close, daemon=True) for tracker in trackers]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def require_trackers(sections: Sequence[TrackerSection]) -> None:
    """Raise ProfileError if the library of a tracker is not installed, or a tracker is listed twice."""
    names = [section.name for section in sections]
    for name in names:
        module = BACKENDS[name][0]
        if names.count(name) > 1:
            raise ProfileError(f"trackers: {name} is listed twice")
        if importlib.util.find_spec(module) is None:
            raise ProfileError(f"trackers: {name} needs the library {module}: pip install {module}")


def open_trackers(
    tracking: TrackingSection, sections: Sequence[TrackerSection], run: TrackedRun
) -> tuple[Tracker, ...]:
    """Start the trackers of a profile."""

    def opener(section: TrackerSection) -> Callable[[], Backend]:
        return lambda: BACKENDS[section.name][1](tracking, section, run)

    return tuple(
        Tracker(one.name, opener(one), completions=one.completions, close_seconds=CLOSE_SECONDS) for one in sections
    )


def numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a line of metrics by name; tables inside are joined with `/`."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, bool | int | float):
            found[f"{prefix}{name}"] = float(value)
    return found


def step_records(report: StepReport, line: Mapping[str, Any], completions: int) -> Iterator[Record]:
    """Return what a tracker gets for a step. line: its metrics. completions: number of rows of the table."""
    yield Values(step=report.step, values=numbers(line))
    if rows := tuple(islice(_rows(report), completions)):
        yield Completions(step=report.step, rows=rows)


def evaluation_values(report: EvalReport) -> Values:
    """Return what a tracker gets for an evaluation. A value that does not exist is missing."""
    names = ("step", "problems", "ungraded", "failed", "reward", "rewards", "loss", "completion_length", "truncated")
    found = {name: getattr(report, name) for name in names}
    if report.samples:
        sampled = {"samples": report.samples, "avg": report.avg, "pass_at": report.pass_at}
        found["sampled"] = sampled | {"reward": report.sampled_reward}
    values = numbers(msgspec.to_builtins(found), "eval/")
    if report.accuracy is not None and report.interval is not None:
        values |= zip(("eval/accuracy", "eval/low", "eval/high"), (report.accuracy, *report.interval), strict=True)
    values |= {f"eval/accuracy/{kind}": share for kind, share in report.by_type.items()}
    return Values(step=report.step, values=values)


def _rows(report: StepReport) -> Iterator[tuple[Any, ...]]:
    """One completion of each group, then of the discarded groups that have rewards."""
    scored = [(t.scored.group.prompt, t.scored.group.completions, t.scored.rewards) for t in report.trained]
    scored += [(d.prompt, d.completions, d.rewards) for d in report.discarded if d.rewards and d.completions]
    for prompt, found, rewards in scored:
        i = report.step % len(found)
        texts = (terminal_text(text, MAX_TEXT) for text in (prompt.problem.prompt, found[i].text))
        yield report.step, prompt.problem.type, *texts, rewards[i]
