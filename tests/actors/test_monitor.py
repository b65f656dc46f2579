"""Monitor: its files, and its behavior when a file, the display or the monitor itself fails."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
import structlog
from anyio import create_task_group, fail_after, wait_all_tasks_blocked
from msgspec.structs import replace
from structlog.testing import capture_logs

from actors.monitor import Monitor
from protocols.evaluation import EvalReport
from protocols.finding import Finding
from protocols.queues import EndOfStream, Outbox
from protocols.step import FirstBatch, GroupsEnded, StepReport
from protocols.summary import Gauges, RunGauges
from tests.actors.monitor_harness import RecordingDisplay, lines, observe
from tests.training_run.records.display_examples import GAUGES, UPDATE, discarded, evaluation, step, trained
from tests.training_run.supervision.scripted_actors import RecordedSupervisor
from training_run.directory.jsonl import JsonlWriter
from training_run.records.display import Display, RunView
from training_run.records.findings import RunFindings
from training_run.records.forecast import RemainingWork, RunForecast
from training_run.records.metrics import all_metrics
from training_run.supervision.hooks import ReportObserver
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import temporary, transient


async def test_every_step_is_a_line_of_metrics_and_every_evaluation_a_line_of_evaluations(tmp_path: Path) -> None:
    """Each file is in order of `step`, although an evaluation may end after later steps."""
    early_and_late = (step(1), step(2), evaluation(1, 0.5), evaluation(3, 0.6), step(3), evaluation(4, 0.7, final=True))
    await observe(tmp_path, evaluation(0, 0.43), *early_and_late)
    steps, evaluations = lines(tmp_path / "metrics.jsonl"), lines(tmp_path / "evaluations.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line.keys() == all_metrics().keys() for line in steps)
    assert [(line["step"], line["accuracy"]) for line in evaluations] == [(0, 0.43), (1, 0.5), (3, 0.6), (4, 0.7)]
    assert evaluations[0]["accuracy_by_type"] == {"arithmetic": 0.43, "word": 0.25}
    assert [line["final"] for line in evaluations] == [False, False, False, True]


async def test_a_resumed_run_continues_the_files(tmp_path: Path) -> None:
    """The age of the run includes the earlier process."""
    await observe(tmp_path, step(1), step(2))
    await observe(tmp_path, evaluation(2, 0.9, final=True), step(3), first_step=2, seconds_before=60.0)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert lines(tmp_path / "metrics.jsonl")[-1]["time/run"] > 60.0
    assert [line["step"] for line in lines(tmp_path / "evaluations.jsonl")] == [2]


async def test_the_speed_is_the_mean_of_ten_steps_and_of_the_run_at_its_end(tmp_path: Path) -> None:
    """A step of few tokens, such as the last one, does not determine the speed that a user sees."""
    display = RecordingDisplay()
    reports = [step(number, groups=(trained(number),) * (9 if number > 2 else 1)) for number in range(1, 13)]
    await observe(tmp_path, *reports, display=display)
    done = lines(tmp_path / "metrics.jsonl")
    tokens = [line["completion_length/total"] for line in done]
    ages = [0.0, *(line["time/run"] for line in done)]
    running, ended = [view for view in display.views if view.step == 12]
    assert running.tokens_per_second == pytest.approx(sum(tokens[2:]) / (ages[12] - ages[2]))
    assert ended.tokens_per_second == pytest.approx(sum(tokens) / ages[12])
    assert (running.has_ended, ended.has_ended) == (False, True)


async def test_a_line_has_the_metrics_of_the_batch(tmp_path: Path) -> None:
    """Rewards and tokens of discarded groups count; times are differences between gauges.

    The rate of a step is that of its completions, although the last ones of a run were sampled during the step before.
    """
    gauges = iter(
        [
            RunGauges(),
            RunGauges(tokens_sampled=100, decode_seconds=0.25, swap_seconds_last=0.001, peak_memory_bytes=5),
            RunGauges(tokens_sampled=150, decode_seconds=0.50),
        ]
    )
    dropped = (discarded(7), discarded(8, "stale", sampled=False))
    await observe(tmp_path, step(1, discarded=dropped), step(2, groups=(), update=None), gauges=lambda: next(gauges))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["reward/mean"] == pytest.approx(0.5)
    assert first["reward/std"] == pytest.approx((0.5) ** 0.5 / 2)
    assert (first["groups/trained"], first["groups/discarded"]) == (1, 2)
    assert first["groups/discarded_by_reason"] == {"zero_variance": 1, "stale": 1}
    assert (first["completion_length/total"], first["truncated_fraction"]) == (12, 0.5)
    assert (first["staleness/mean"], first["staleness/max"]) == (1.0, 1)
    assert (first["time/decode"], first["time/weight_swap"], first["peak_memory_bytes"]) == (0.25, 0.001, 5)
    assert first["tokens_per_second"] == pytest.approx(12 / first["time/run"])
    assert first["loss"] == UPDATE.loss
    assert second["tokens_per_second"] == 0.0
    keys = ("loss", "kl", "reward/mean", "staleness/max", "truncated_fraction")
    assert [second[key] for key in keys] == [None] * 5


async def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """The file stays valid JSON in a diverging run."""
    update = type(UPDATE)(
        loss=float("nan"), kl=float("inf"), entropy=0.1, clip_fraction=0.0, mismatch_kl=0.0, ratio_mean=1.0,
        grad_norm=float("-inf"), learning_rate=1e-5, trained_tokens=1, update_applied=False,
            ess=float("nan"), rejected_fraction=0.0, kl_beta=0.0, entropy_coef=0.0, optimizer_steps=1,
    )  # fmt: skip
    await observe(tmp_path, step(1, update=update, groups=(trained(rewards=(float("nan"), 1.0)),)))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert [line[key] for key in ("loss", "kl", "grad_norm")] == [None] * 3
    assert (line["reward/mean"], line["reward/std"]) == (1.0, 0.0)
    assert line["update_applied"] is False
    assert lines(tmp_path / "rollouts.jsonl")[0]["completions"][0]["reward"] is None


async def test_the_rollout_log_has_every_group(tmp_path: Path) -> None:
    """With completions, reward components, advantages, versions, and the reason of discarding."""
    dropped = (discarded(7), discarded(8, "generation_error", sampled=False))
    await observe(tmp_path, step(3, groups=(trained(6, text='a "\n\ud800'),), discarded=dropped))
    first, second, third = lines(tmp_path / "rollouts.jsonl")
    assert [(line["group_id"], line["step"], line["outcome"]) for line in (first, second, third)] == [
        (6, 3, "trained"), (7, 3, "discarded"), (8, 3, "discarded"),
    ]  # fmt: skip
    assert first["prompt"] == 'a "\n\ufffd'
    assert (first["answer"], first["type"], first["reason"]) == ("4", "arithmetic", None)
    assert first["completions"][1] == {
        "text": 'a "\n\ufffd', "reward": 0.0, "parts": {"format": 0.0, "jaccard": None}, "advantage": -1.0,
        "first_version": 1, "last_version": 2, "finish_reason": "stop", "tokens": 3,
            "turns": [],
    }  # fmt: skip
    assert (second["reason"], second["detail"]) == ("zero_variance", "why")
    assert [c["reward"] for c in second["completions"]] == [0.5, 0.5]
    assert third["completions"] == []


async def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that cannot be written are lost and counted; later lines are attempted again."""
    append, full = JsonlWriter.append, [True]

    def fail(self: JsonlWriter, record: Any) -> None:
        if full[0] and self.path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        full[0] = full[0] and getattr(record, "group_id", 0) < 5
        append(self, record)

    monkeypatch.setattr(JsonlWriter, "append", fail)
    with structlog.testing.capture_logs() as logs:
        await observe(tmp_path, *(step(number) for number in range(1, 8)))
    assert [(entry["event"], entry["file"]) for entry in logs] == [
        ("write_failed", "metrics.jsonl"),
        ("write_recovered", "metrics.jsonl"),
    ]
    assert logs[0]["error"] == "No space left on device"
    assert logs[1]["failed_writes"] == 4
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [5, 6, 7]
    assert len(lines(tmp_path / "rollouts.jsonl")) == 7


async def test_the_text_of_a_finding_is_repeated_after_a_line_that_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every finding of the file has its text in the first line that names it."""
    append, attempts = JsonlWriter.append, Counter[str]()

    def fail(self: JsonlWriter, record: Any) -> None:
        attempts[self.path.name] += 1
        if self.path.name == "metrics.jsonl" and attempts[self.path.name] == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, record)

    monkeypatch.setattr(JsonlWriter, "append", fail)
    dropped = tuple(discarded(number) for number in range(4))
    await observe(tmp_path, *(step(number, groups=(), discarded=dropped, update=None) for number in (1, 2, 3)))
    named = [[list(finding) for finding in line["findings"]] for line in lines(tmp_path / "metrics.jsonl")]
    assert named == [[list(Finding.__struct_fields__)], [["name", "fact"]]]


class FailingDisplay(Display):
    """A display that fails at a view, the second one by default."""

    def __init__(self, fails_at: int = 2) -> None:
        self.shown = self.closed = 0
        self._fails_at = fails_at

    def show(self, view: RunView) -> None:
        self.shown += 1
        if self.shown >= self._fails_at:
            raise RuntimeError("the terminal is gone")

    def close(self) -> None:
        self.closed += 1


async def test_a_failing_display_is_closed_and_the_files_are_still_written(tmp_path: Path) -> None:
    """The failure is logged once."""
    display = FailingDisplay()
    with structlog.testing.capture_logs() as logs:
        await observe(tmp_path, step(1), step(2), step(3), display=display)
    assert [entry["event"] for entry in logs] == ["display_failed"]
    assert (display.shown, display.closed) == (2, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


class UnclosableDisplay(FailingDisplay):
    """A display that fails at a view, and fails again when it is closed."""

    def close(self) -> None:
        super().close()
        raise RuntimeError("the terminal is still gone")


async def test_a_display_that_cannot_be_closed_does_not_end_the_monitor(tmp_path: Path) -> None:
    """Neither after its failure nor at the end of the run. Both failures are logged, and the files are complete."""
    failing, late = UnclosableDisplay(), UnclosableDisplay(fails_at=3)
    with structlog.testing.capture_logs() as logs:
        await observe(tmp_path, step(1), step(2), step(3), display=failing)
        await observe(tmp_path, display=late)
    assert [entry["event"] for entry in logs] == ["display_failed", "display_not_closed", "display_not_closed"]
    assert (failing.closed, late.closed) == (1, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


async def test_after_a_failure_the_inbox_is_read_to_its_end(tmp_path: Path) -> None:
    """The learner never waits for a failed monitor; the failure is raised at the end."""
    gauges = iter([RunGauges()])
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ExceptionGroup, check=lambda group: isinstance(group.exceptions[0], RuntimeError)),
    ):
        await observe(tmp_path, *(step(number) for number in range(1, 20)), gauges=lambda: next(gauges))
    assert [entry["event"] for entry in logs] == ["monitor_failed"]


async def test_a_step_is_recorded_after_its_lines_are_written(tmp_path: Path) -> None:
    """At the end of the monitor every wait ends."""
    logged = Latest[int]("logged")
    await observe(tmp_path, step(1), step(2), evaluation(2, 0.5), logged=logged)
    assert logged.value == 2
    with pytest.raises(EndOfStream):
        await logged.wait_until(lambda step: step >= 3)


class FinalEvaluation:
    """An actor that reports a step and the final evaluation."""

    name = "evaluator"

    def __init__(self, outbox: Outbox[StepReport | EvalReport]) -> None:
        self._outbox = outbox

    async def run(self) -> None:
        async with self._outbox:
            await self._outbox.send(step(1))
            await self._outbox.send(evaluation(1, 0.96, final=True))


class BlockedWriter(JsonlWriter):
    """A writer that waits before it writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def append(self, record: Any) -> None:
        self.may_write.wait()
        super().append(record)


def monitor_of(
    queue: Queue[StepReport | EvalReport], metrics: JsonlWriter, *, gauges: Gauges = lambda: GAUGES
) -> Monitor:
    """Return a monitor without display and rollout log."""
    return Monitor(
        inbox=queue.inbox(),
        gauges=gauges,
        display=Display(),
        metrics=metrics,
        evaluations=JsonlWriter(metrics.path.with_name("evaluations.jsonl")),
        rollouts=None,
        logged=Latest[int]("logged"),
        findings=RunFindings({}),
    )


async def test_no_actor_waits_for_the_lines_of_a_monitor_that_has_failed(tmp_path: Path) -> None:
    """Learner and checkpointer wait for those of a step; the monitor ends only after both."""
    queue = Queue[StepReport | EvalReport]("reports", capacity=1)
    writer, gauges = queue.outbox(), Mock(side_effect=[GAUGES, RuntimeError("no gauges")])
    monitor = monitor_of(queue, JsonlWriter(tmp_path / "metrics.jsonl"), gauges=gauges)

    async def report() -> None:
        async with writer:
            await writer.send(step(1))
            with pytest.raises(EndOfStream):
                await monitor.logged.wait_until(lambda number: number >= 1)

    with fail_after(10):
        async with create_task_group() as group:
            group.start_soon(report)
            with pytest.raises(RuntimeError, match="no gauges"):
                await monitor.run()


async def test_the_run_waits_for_the_last_line(tmp_path: Path) -> None:
    """All other actors have ended while an earlier line is still being written."""
    queue = Queue[StepReport | EvalReport]("reports", capacity=4)
    metrics = BlockedWriter(tmp_path / "metrics.jsonl")
    monitor = monitor_of(queue, metrics)
    recorded = RecordedSupervisor(temporary(monitor, ends_with_input=True), transient(FinalEvaluation(queue.outbox())))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(recorded.run)
            try:
                await wait_all_tasks_blocked()
                assert recorded.states() == {"monitor": "running", "evaluator": "done"}
            finally:
                metrics.may_write.set()
    assert [(line["step"], line["accuracy"]) for line in lines(tmp_path / "evaluations.jsonl")] == [(1, 0.96)]
    assert recorded.failures == []


async def test_a_cancelled_monitor_leaves_complete_lines(tmp_path: Path) -> None:
    """As after a second Ctrl-C."""
    queue = Queue[StepReport | EvalReport]("reports", capacity=4)
    metrics = JsonlWriter(tmp_path / "metrics.jsonl")
    monitor = monitor_of(queue, metrics)
    writer = queue.outbox()
    async with create_task_group() as group:
        group.start_soon(monitor.run)
        await writer.send(step(1))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    writer.close()
    assert all(line["step"] == 1 for line in lines(tmp_path / "metrics.jsonl"))
    with pytest.raises(ValueError, match="is closed"):
        metrics.append({})


async def test_the_view_has_a_bounded_size(tmp_path: Path) -> None:
    """Counts of all batches, the first and the latest evaluations, the latest rewards, one sample."""
    display = RecordingDisplay()
    reports: list[StepReport | EvalReport] = [evaluation(0, 0.1)]
    for number in range(1, 601):
        reports.append(step(number, discarded=(discarded(reason="stale"),)))
        if number % 60 == 0:
            reports.append(evaluation(number, number / 600))
    forecast = RunForecast(RemainingWork(steps=1200, evaluates=False), began=0.0)
    await observe(tmp_path, *reports, display=display, forecast=forecast)
    last = display.views[-1]
    assert (last.step, last.trained, last.discarded) == (600, 600, {"stale": 600})
    assert len(last.rewards) == 512
    assert [report.step for report in last.evaluations] == [0, 360, 420, 480, 540, 600]
    assert last.sample is not None
    assert last.sample.reward == 1.0
    assert last.seconds_left == pytest.approx(last.seconds, rel=0.2)
    assert display.views[0].seconds_left is None


async def test_groups_discarded_between_two_batches_are_counted_once(tmp_path: Path) -> None:
    """Each has a line in the rollout log; the metrics of the next step count them."""
    between = GroupsEnded(step=1, discarded=(discarded(50), discarded(51)))
    await observe(tmp_path, between, step(1), step(2))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["groups/discarded"] == second["groups/discarded"] + 2
    assert (first["groups/mixed"], first["groups/solved_none"]) == (1.0, 0.0)
    rollouts = [line["group_id"] for line in lines(tmp_path / "rollouts.jsonl") if line["step"] == 1]
    assert rollouts[:2] == [50, 51]


async def test_the_first_groups_are_checked_when_they_arrive(tmp_path: Path) -> None:
    """The learner waits for this. No file has a line about them yet."""
    logged = Latest[int]("logged")
    first = FirstBatch(step=3, groups=tuple(discarded(number) for number in range(4)))
    with capture_logs() as events:
        await observe(tmp_path, first, first_step=2, logged=logged)
    assert logged.value == 2
    assert [event["finding"] for event in events] == ["all_truncated"]
    assert not (tmp_path / "rollouts.jsonl").exists() or lines(tmp_path / "rollouts.jsonl") == []


class RecordingObserver(ReportObserver):
    """An observer that keeps what it is told, and cannot write it."""

    name = "observed"

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.found: list[tuple[int, str]] = []
        self.writes = 0

    def step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        self.told.append(("step", line["step"]))

    def groups(self, report: GroupsEnded) -> None:
        self.told.append(("groups", report.step))

    def evaluation(self, report: EvalReport) -> None:
        self.told.append(("evaluation", report.step))

    def finding(self, step: int, finding: Finding) -> None:
        self.found.append((step, finding.name))

    def write(self) -> None:
        self.writes += 1
        raise OSError(28, "No space left on device")


async def test_observers_are_told_of_every_report(tmp_path: Path) -> None:
    """In order, and asked to write after each step and at the end. A write that fails is reported once."""
    observer = RecordingObserver()
    with structlog.testing.capture_logs() as logs:
        ended = GroupsEnded(step=2, discarded=(discarded(7),))
        await observe(tmp_path, step(1), evaluation(1, 0.5), ended, step(2), observers=[observer])
    assert observer.told == [("step", 1), ("evaluation", 1), ("groups", 2), ("step", 2)]
    assert observer.writes == 3
    assert [(entry["event"], entry["file"]) for entry in logs] == [("write_failed", "observed")]
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


async def test_observers_get_a_finding_when_it_begins(tmp_path: Path) -> None:
    """Once, however long it lasts."""
    observer = RecordingObserver()
    dropped = tuple(replace(discarded(number), parts={"format": (0.0, 0.0)}) for number in range(4))
    silent = [step(number, groups=(), discarded=dropped, update=None) for number in (1, 2, 3)]
    await observe(tmp_path, *silent, observers=[observer])
    assert observer.found == [(1, "all_truncated")]
    assert [[found["name"] for found in line["findings"]] for line in lines(tmp_path / "metrics.jsonl")] == [
        ["all_truncated"]
    ] * 3
