"""Trackers: files that their own libraries read back, and faults that never reach the run."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from attachments.trackers import trackers
from attachments.trackers.attachment import TrackedReports
from attachments.trackers.sections import TrackerSection
from attachments.trackers.trackers import (
    CAPACITY,
    Completions,
    Record,
    TrackedRun,
    Tracker,
    Values,
    Warned,
    close_trackers,
    evaluation_values,
    numbers,
    open_trackers,
    require_trackers,
    step_records,
)
from protocols.errors import ProfileError
from protocols.finding import CHECK, Finding
from tests.training_run.records.display_examples import (
    MEASURES,
    discarded,
    evaluation,
    step,
    trained,
    ungraded_evaluation,
)
from training_run.profile.load import load_profile
from training_run.profile.schema import TrackingSection

LOG_BLOCK = 32768
TRACKING = TrackingSection(project="proj", group="g", run_name="first", tags=("a", "b"))
LINE: dict[str, Any] = {
    "step": 1, "loss": 0.5, "kl": None, "update_applied": True, "rewards": {"format": {"mean": 0.25}}, "findings": [],
}  # fmt: skip

FINDING = Finding(name="slow", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)


def tracked(directory: Path) -> TrackedRun:
    """A run in a directory."""
    return TrackedRun(id="0123456789abcdef", name="run", directory=directory, settings={"steps": 2, "seed": 0})


def written(name: Any, directory: Path, mode: Any = "offline") -> None:
    """Write one step, one evaluation and a warning with a real tracker, and close it."""
    (tracker,) = open_trackers(TRACKING, [TrackerSection(name=name, mode=mode)], tracked(directory))
    for record in (*step_records(step(1), LINE, 2), evaluation_values(evaluation(1, 0.5)), Warned(step=1, text="w")):
        tracker.put(record)
    close_trackers([tracker])


def test_tensorboard_reads_the_numbers_back(tmp_path: Path) -> None:
    """From the event files in RUN_DIR/tensorboard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name, value in {"loss": 0.5, "rewards/format/mean": 0.25, "eval/accuracy": 0.5}.items():
        (found,) = events.Scalars(name)
        assert (found.step, found.value) == (1, value)
    assert {"completions/text_summary", "warnings/text_summary"} <= set(events.Tags()["tensors"])


def test_a_tracker_gets_the_numbers_of_an_evaluation() -> None:
    """Intervals and counts too. A value that does not exist is missing."""
    found = evaluation_values(replace(evaluation(2, 0.5), **MEASURES)).values
    assert (found["eval/accuracy"], found["eval/low"], found["eval/accuracy/word"]) == (0.5, 0.0, 0.25)
    assert (found["eval/reward/value"], found["eval/rewards/format/value"], found["eval/loss/high"]) == (
        0.75,
        1.0,
        0.625,
    )
    assert (found["eval/sampled/avg/value"], found["eval/sampled/pass_at/4/low"]) == (0.5, 0.625)
    assert evaluation_values(ungraded_evaluation(2)).values == {
        "eval/step": 2.0, "eval/problems": 0.0, "eval/ungraded": 500.0, "eval/failed": 3.0
    }  # fmt: skip


def log_records(contents: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb uses, after its header of 7 bytes."""
    at, joined = 7, b""
    while at + 7 <= len(contents):
        if LOG_BLOCK - at % LOG_BLOCK < 7:
            at += LOG_BLOCK - at % LOG_BLOCK
            continue
        length, kind = int.from_bytes(contents[at + 4 : at + 6], "little"), contents[at + 6]
        joined += contents[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield joined
            joined = b""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not end a tracker early."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 300.0)


@pytest.mark.slow
def test_wandb_reads_the_numbers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file of an offline run."""
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    written("wandb", tmp_path)
    (file,) = tmp_path.rglob("run-*.wandb")
    found: dict[str, str] = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found |= {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if record.run.project:
            assert (record.run.project, record.run.run_group, record.run.display_name) == ("proj", "g", "first")
    assert found["loss"] == "0.5"
    assert found["eval/accuracy"] == "0.5"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "mode", "files"), [("offline", "auto", 1), ("disabled", "auto", 0), ("disabled", "offline", 1)]
)
def test_the_mode_of_wandb_is_that_of_the_environment(
    variable: str, mode: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the profile states one. With the library itself, which writes a file in offline mode."""
    importlib.import_module("wandb").teardown()  # it reads its variables once in a process
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    written("wandb", tmp_path, mode)
    assert len(list(tmp_path.rglob("run-*.wandb"))) == files


@pytest.mark.slow
def test_trackio_reads_the_numbers_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its database on this machine."""
    from trackio.sqlite_storage import SQLiteStorage

    for module in ("trackio.utils", "trackio.sqlite_storage"):
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path)
    written("trackio", tmp_path)
    logs = SQLiteStorage.get_logs("proj", "first")
    assert {line["loss"] for line in logs if "loss" in line} == {0.5}


class Gate:
    """A backend that waits until it may go on."""

    def __init__(self) -> None:
        self.open, self.records, self.closed = threading.Event(), list[Record](), False

    def write(self, record: Record) -> None:
        self.open.wait()
        self.records.append(record)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_that_hangs_loses_records_and_delays_nothing() -> None:
    """`put` returns at once, and `close` abandons the tracker after its time."""
    gate = Gate()
    tracker = Tracker("hangs", lambda: gate, close_seconds=0.01)
    with capture_logs() as events:
        for number in range(CAPACITY + 10):
            tracker.put(Values(step=number, values={}))
        tracker.close()
    assert {event["event"] for event in events} == {"tracker_is_slow", "tracker_abandoned"}
    gate.open.set()


def test_a_tracker_that_fails_is_reported_once() -> None:
    """Also if it fails when it is opened."""

    def fail() -> Gate:
        raise RuntimeError("no\nnetwork")

    with capture_logs() as events:
        tracker = Tracker("fails", fail)
        tracker.close()
        tracker.put(Values(step=1, values={}))
    assert [(event["event"], event["error"]) for event in events] == [("tracker_failed", "RuntimeError: no network")]


def test_waiting_records_are_written_before_a_tracker_closes() -> None:
    """In their order."""
    gate = Gate()
    gate.open.set()
    tracker = Tracker("works", lambda: gate)
    records = [Values(step=number, values={"x": 1.0}) for number in range(50)]
    for record in records:
        tracker.put(record)
    tracker.close()
    assert (gate.records, gate.closed) == (records, True)


def test_the_numbers_of_a_line_have_flat_names() -> None:
    """Tables are joined with `/`; null, lists and texts are left out."""
    assert numbers(LINE) == {"step": 1.0, "loss": 0.5, "update_applied": 1.0, "rewards/format/mean": 0.25}


def test_a_step_has_a_table_of_completions() -> None:
    """One completion of each group, at most as many as the profile says."""
    report = step(1, groups=(trained(0), trained(1)), discarded=(discarded(2),))
    kinds = [type(record).__name__ for record in step_records(report, LINE, 2)]
    assert kinds == ["Values", "Completions"]
    assert [type(record).__name__ for record in step_records(report, LINE, 0)] == ["Values"]


def test_a_missing_library_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run starts; so is a tracker that is listed twice."""
    sections = [TrackerSection(name="tensorboard")]
    require_trackers(sections)
    with pytest.raises(ProfileError):
        require_trackers(sections * 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProfileError, match="pip install tensorboardX"):
        require_trackers(sections)


def test_only_wandb_has_an_offline_mode() -> None:
    """The other trackers write to this machine in any case, so that the setting would have no effect."""
    load_profile("local-m3", {"trackers": [{"name": "wandb", "mode": "offline"}]})
    with pytest.raises(ProfileError, match="trackers"):
        load_profile("local-m3", {"trackers": [{"name": "tensorboard", "mode": "offline"}]})


class RecordingTracker(Tracker):
    """A tracker that keeps its records."""

    def __init__(self) -> None:
        self.completions, self.records = 1, list[Record]()

    def put(self, record: Record) -> None:
        self.records.append(record)


def test_trackers_get_steps_evaluations_and_findings() -> None:
    """In the order in which the monitor tells them. A step has its numbers and a table of completions."""
    tracker = RecordingTracker()
    reports = TrackedReports((tracker,))
    reports.step(step(3, groups=(trained(1),)), LINE)
    reports.finding(3, FINDING)
    reports.evaluation(evaluation(4, 0.5))
    assert [(type(record), record.step) for record in tracker.records] == [
        (Values, 3), (Completions, 3), (Warned, 3), (Values, 4),
    ]  # fmt: skip
    assert [record.text for record in tracker.records if isinstance(record, Warned)] == [FINDING.text]
