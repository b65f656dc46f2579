"""The monitor: every line written, every message read, and no failure of its own felt by anybody."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from anyio import create_task_group, fail_after, wait_all_tasks_blocked

from actors.monitor import Monitor
from clotho.monitoring.display import NoDisplay, RunView
from clotho.runtime.child import temporary, transient
from clotho.runtime.latest import Latest
from clotho.runtime.queues import Queue
from clotho.storage.jsonl_writer import LineWriter
from protocols.evaluation import EvalReport
from protocols.queues import EndOfStream, Outbox
from protocols.step import GroupsEnded, StepReport
from protocols.summary import RunGauges
from tests.actors.monitor_scene import Remembering, lines, observe
from tests.monitoring.examples import GAUGES, UPDATE, discarded, evaluation, step, trained
from tests.runtime.scene import Scene

METRICS_KEYS = {
    "step", "policy_version", "reward_mean", "reward_std", "loss",
    "kl", "entropy", "clip_fraction", "mismatch_kl", "grad_norm",
    "learning_rate", "groups_trained", "groups_discarded", "staleness_mean", "staleness_max",
    "completion_tokens", "tokens_per_second", "decode_seconds", "train_seconds", "wait_seconds",
    "swap_seconds", "peak_memory_bytes", "seconds", "decode_rate_idle", "decode_rate_learning",
}  # fmt: skip


async def test_every_batch_is_a_line_and_measurements_are_on_the_first_and_the_last(tmp_path: Path) -> None:
    """The base policy has a line of its own, step 0; the final measurement is part of the last step's line."""
    await observe(tmp_path, evaluation(0, 0.43), step(1), step(2), evaluation(2, 0.96, final=True))
    found = lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in found] == [0, 1, 2]
    assert found[0]["eval_accuracy"] == 0.43
    assert found[0]["eval_by_type"] == {"arithmetic": 0.43, "word": 0.25}
    assert "eval_accuracy" not in found[1]
    assert found[2]["eval_accuracy"] == 0.96
    assert found[2]["eval_final"] is True
    assert found[1].keys() >= METRICS_KEYS
    assert found[2].keys() >= METRICS_KEYS


async def test_a_measurement_that_comes_late_or_early_finds_its_place(tmp_path: Path) -> None:
    """Late: a line of its own, which says its step. Early: it waits for the line of its step, at most till the end."""
    await observe(
        tmp_path, step(1), step(2), evaluation(1, 0.5), evaluation(3, 0.6), step(3), evaluation(4, 0.7, final=True)
    )
    found = [(line["step"], line.get("eval_accuracy"), "loss" in line) for line in lines(tmp_path / "metrics.jsonl")]
    assert found == [(1, None, True), (2, None, True), (1, 0.5, False), (3, 0.6, True), (4, 0.7, False)]


async def test_a_resumed_run_measures_the_line_of_its_predecessor(tmp_path: Path) -> None:
    """Killed during the final measurement, the run has its last line already: the measurement joins it."""
    await observe(tmp_path, step(1), step(2))
    await observe(tmp_path, evaluation(2, 0.9, final=True), first_step=2, seconds_before=60.0)
    await observe(tmp_path, evaluation(2, 0.9, final=True), first_step=2)
    found = lines(tmp_path / "metrics.jsonl")
    assert [(line["step"], line.get("eval_accuracy")) for line in found] == [(1, None), (2, 0.9), (2, 0.9)]


async def test_the_numbers_of_a_line_are_those_of_the_batch(tmp_path: Path) -> None:
    """Rewards of discarded groups count; rates are differences of the gauges."""
    gauges = iter(
        [
            RunGauges(),
            RunGauges(tokens_sampled=100, decode_seconds=0.25, swap_seconds_last=0.001, peak_memory_bytes=5),
            RunGauges(tokens_sampled=150, decode_seconds=0.50),
        ]
    )
    lost = (discarded(7), discarded(8, "stale", sampled=False))
    await observe(tmp_path, step(1, lost=lost), step(2, groups=(), update=None), gauges=lambda: next(gauges))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["reward_mean"] == pytest.approx(0.5)
    assert first["reward_std"] == pytest.approx((0.5) ** 0.5 / 2)
    assert (first["groups_trained"], first["groups_discarded"]) == (1, 2)
    assert first["discarded"] == {"zero_variance": 1, "stale": 1}
    assert (first["completion_tokens"], first["truncated"]) == (12, 0.5)
    assert (first["staleness_mean"], first["staleness_max"]) == (1.0, 1)
    assert (first["decode_seconds"], first["swap_seconds"], first["peak_memory_bytes"]) == (0.25, 0.001, 5)
    assert first["tokens_per_second"] == pytest.approx(100 / first["seconds"])
    assert first["loss"] == UPDATE.loss
    assert second["tokens_per_second"] == pytest.approx(50 / (second["seconds"] - first["seconds"]))
    assert [second[key] for key in ("loss", "kl", "reward_mean", "staleness_max", "truncated")] == [None] * 5
    assert "ratio_mean" in first
    assert "tokens" not in first


async def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """A diverging run is exactly when somebody reads the file."""
    update = type(UPDATE)(
        loss=float("nan"), kl=float("inf"), entropy=0.1, clip_fraction=0.0, mismatch_kl=0.0, ratio_mean=1.0,
        grad_norm=float("-inf"), learning_rate=1e-5, tokens=1, applied=False,
            ess=float("nan"), rejected_fraction=0.0, kl_beta=0.0, entropy_weight=0.0, optimizer_steps=1,
    )  # fmt: skip
    await observe(tmp_path, step(1, update=update, groups=(trained(rewards=(float("nan"), 1.0)),)))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert [line[key] for key in ("loss", "kl", "grad_norm")] == [None] * 3
    assert (line["reward_mean"], line["reward_std"]) == (1.0, 0.0)
    assert line["applied"] is False
    assert lines(tmp_path / "rollouts.jsonl")[0]["completions"][0]["reward"] is None


async def test_every_group_is_in_the_rollouts_trained_or_not(tmp_path: Path) -> None:
    """With its completions, rewards part by part, advantages, versions, and why it was discarded."""
    lost = (discarded(7), discarded(8, "generation_error", sampled=False))
    await observe(tmp_path, step(3, groups=(trained(6, text='a "\n\ud800'),), lost=lost))
    first, second, third = lines(tmp_path / "rollouts.jsonl")
    assert [(line["group_id"], line["step"], line["outcome"]) for line in (first, second, third)] == [
        (6, 3, "trained"), (7, 3, "discarded"), (8, 3, "discarded"),
    ]  # fmt: skip
    assert first["prompt"] == 'a "\n\ufffd'
    assert (first["answer"], first["type"], first["reason"]) == ("4", "arithmetic", None)
    assert first["completions"][1] == {
        "text": 'a "\n\ufffd', "reward": 0.0, "parts": {"format": 0.0, "jaccard": None}, "advantage": -1.0,
        "first_version": 1, "last_version": 2, "finish_reason": "stop", "tokens": 3,
    }  # fmt: skip
    assert (second["reason"], second["detail"]) == ("zero_variance", "why")
    assert [c["reward"] for c in second["completions"]] == [0.5, 0.5]
    assert third["completions"] == []


async def test_a_full_disk_is_reported_once_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that cannot be written are lost, said once and counted; the next ones are tried again."""
    append, full = LineWriter.append, [True]

    def fail(self: LineWriter, record: Any) -> None:
        if full[0] and self.path.name == "metrics.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        full[0] = full[0] and getattr(record, "group_id", 0) < 5
        append(self, record)

    monkeypatch.setattr(LineWriter, "append", fail)
    with structlog.testing.capture_logs() as logs:
        await observe(tmp_path, *(step(number) for number in range(1, 8)))
    assert [(entry["event"], entry["file"]) for entry in logs] == [
        ("not_written", "metrics.jsonl"),
        ("written_again", "metrics.jsonl"),
    ]
    assert logs[0]["error"] == "No space left on device"
    assert logs[1]["reports_missed"] == 4
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [5, 6, 7]
    assert len(lines(tmp_path / "rollouts.jsonl")) == 7


class Broken(NoDisplay):
    """A display that fails at the second view, and counts how often it was closed."""

    def __init__(self) -> None:
        self.shown = self.closed = 0

    def show(self, view: RunView) -> None:
        self.shown += 1
        if self.shown > 1:
            raise RuntimeError("the terminal is gone")

    def close(self) -> None:
        self.closed += 1


async def test_a_display_that_fails_is_closed_and_the_files_go_on(tmp_path: Path) -> None:
    """Said once."""
    display = Broken()
    with structlog.testing.capture_logs() as logs:
        await observe(tmp_path, step(1), step(2), step(3), display=display)
    assert [entry["event"] for entry in logs] == ["display_failed"]
    assert (display.shown, display.closed) == (2, 1)
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


async def test_whatever_fails_the_inbox_is_read_to_its_end(tmp_path: Path) -> None:
    """The learner never waits for a monitor that is broken; the failure is raised when everything was read."""
    gauges = iter([RunGauges()])
    with (
        structlog.testing.capture_logs() as logs,
        pytest.raises(ExceptionGroup, check=lambda group: isinstance(group.exceptions[0], RuntimeError)),
    ):
        await observe(tmp_path, *(step(number) for number in range(1, 20)), gauges=lambda: next(gauges))
    assert [entry["event"] for entry in logs] == ["monitor_failed"]


async def test_a_step_is_on_record_once_its_lines_are_written(tmp_path: Path) -> None:
    """Whoever waits for a step is let go at the end, whether or not it came."""
    recorded = Latest[int]("recorded")
    await observe(tmp_path, step(1), step(2), evaluation(2, 0.5), recorded=recorded)
    assert recorded.value == 2
    with pytest.raises(EndOfStream):
        await recorded.wait_until(lambda step: step >= 3)


class MeasuringLast:
    """Reports a step and the final measurement, and has ended."""

    name = "evaluator"

    def __init__(self, outbox: Outbox[StepReport | EvalReport]) -> None:
        self._outbox = outbox

    async def run(self) -> None:
        async with self._outbox:
            await self._outbox.send(step(1))
            await self._outbox.send(evaluation(1, 0.96, final=True))


class Held(LineWriter):
    """A disk on which nothing is written until it may be."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def append(self, record: Any) -> None:
        self.may_write.wait()
        super().append(record)


def writing_only(mailbox: Queue[StepReport | EvalReport], metrics: LineWriter) -> Monitor:
    """A monitor of this mailbox that shows nothing."""
    return Monitor(
        inbox=mailbox.reader(),
        gauges=lambda: GAUGES,
        display=NoDisplay(),
        metrics=metrics,
        rollouts=None,
        recorded=Latest[int]("recorded"),
    )


async def test_the_last_measurement_is_written_however_late_it_comes(tmp_path: Path) -> None:
    """Everybody else has ended while an earlier line is still being written: the run waits for the monitor."""
    mailbox = Queue[StepReport | EvalReport]("reports", capacity=4)
    metrics = Held(tmp_path / "metrics.jsonl")
    monitor = writing_only(mailbox, metrics)
    scene = Scene(temporary(monitor, ends_with_input=True), transient(MeasuringLast(mailbox.writer())))
    with fail_after(5):
        async with create_task_group() as group:
            group.start_soon(scene.run)
            try:
                await wait_all_tasks_blocked()
                assert scene.states() == {"monitor": "running", "evaluator": "done"}
            finally:
                metrics.may_write.set()
    assert [(line["step"], line["eval_accuracy"]) for line in lines(tmp_path / "metrics.jsonl")] == [(1, 0.96)]
    assert scene.failures == []


async def test_a_cancelled_monitor_leaves_whole_lines(tmp_path: Path) -> None:
    """The second Ctrl-C stops at once."""
    mailbox = Queue[StepReport | EvalReport]("reports", capacity=4)
    metrics = LineWriter(tmp_path / "metrics.jsonl")
    monitor = writing_only(mailbox, metrics)
    writer = mailbox.writer()
    async with create_task_group() as group:
        group.start_soon(monitor.run)
        await writer.send(step(1))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    writer.close()
    assert all(line["step"] == 1 for line in lines(tmp_path / "metrics.jsonl"))
    with pytest.raises(ValueError, match="is closed"):
        metrics.append({})


async def test_the_view_tells_the_whole_story_in_bounded_space(tmp_path: Path) -> None:
    """Counts of all batches; the first measurement and the latest; the last rewards; one sample of the last batch."""
    display = Remembering()
    reports: list[StepReport | EvalReport] = [evaluation(0, 0.1)]
    for number in range(1, 601):
        reports.append(step(number, lost=(discarded(reason="stale"),)))
        if number % 60 == 0:
            reports.append(evaluation(number, number / 600))
    await observe(tmp_path, *reports, display=display)
    last = display.views[-1]
    assert (last.step, last.trained, last.discarded) == (600, 600, {"stale": 600})
    assert len(last.rewards) == 512
    assert [report.step for report in last.evaluations] == [0, 360, 420, 480, 540, 600]
    assert last.sample is not None
    assert last.sample.reward == 1.0
    assert last.seconds_left(1200) == pytest.approx(last.seconds)
    assert display.views[0].seconds_left(600) is None


async def test_groups_that_ended_between_two_batches_are_written_and_counted_once(tmp_path: Path) -> None:
    """Each has its line among the rollouts; the line of the batch that was forming counts them, the next does not."""
    early = GroupsEnded(step=1, discarded=(discarded(50), discarded(51)))
    await observe(tmp_path, early, step(1), step(2))
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["groups_discarded"] == second["groups_discarded"] + 2
    rollouts = [line["group_id"] for line in lines(tmp_path / "rollouts.jsonl") if line["step"] == 1]
    assert rollouts[:2] == [50, 51]
