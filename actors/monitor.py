"""Monitor: writes metrics and rollouts, and shows how the run stands. Its failure never stops training."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from anyio import to_thread

from clotho.monitoring.display import Display, NoDisplay, RunView, Sample, sample
from clotho.monitoring.metrics import Moment, StepMetrics, evaluation_fields, step_metrics
from clotho.monitoring.rollout_log import rollout_records
from clotho.runtime.latest import Latest
from clotho.storage.jsonl_writer import LineWriter
from protocols.evaluation import EvalReport
from protocols.queues import Inbox
from protocols.step import GroupsEnded, StepReport
from protocols.summary import Gauges

log = structlog.get_logger(actor="monitor")

REWARDS_KEPT = 512
EVALUATIONS_KEPT = 5
EARLY_KEPT = 8
"""Measurements that wait for their step; one more, and it gets a line of its own."""


class Monitor:
    """Reads what the learner and the evaluator report.

    metrics.jsonl has one line per consumed batch, written at once. A measurement becomes part of the line of its step
    where that is the last line (so it is at the end of the run), and otherwise a line of its own with `step` and
    `policy_version` (so it is for the base policy, step 0). A measurement that arrives before its step waits for it.

    A file that cannot be written is reported once and tried again with the next line. Whatever else goes wrong, the
    inbox is read to its end, so that nobody ever waits for the monitor; then the failure is raised.

    recorded: the last step whose lines have been written, as far as the disk took them; closed when no more will be.
    """

    name = "monitor"

    def __init__(
        self,
        *,
        inbox: Inbox[StepReport | GroupsEnded | EvalReport],
        gauges: Gauges,
        display: Display,
        metrics: LineWriter,
        rollouts: LineWriter | None,
        recorded: Latest[int],
        first_step: int = 0,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rollouts: None writes none. first_step, seconds_before: where a resumed run stands, and its age."""
        self._inbox, self._gauges, self._display = inbox, gauges, display
        self._metrics, self._rollouts = metrics, rollouts
        self.recorded = recorded
        self._step, self._first_step = first_step, first_step
        self._seconds_before, self._clock, self._began = seconds_before, clock, clock()
        self._last = Moment(seconds=seconds_before, gauges=gauges())
        self._early: dict[int, EvalReport] = {}
        self._failing: Counter[str] = Counter()
        self._trained, self._discarded = 0, Counter[str]()
        self._ended_early = Counter[tuple[str, str]]()
        self._rewards: deque[float] = deque(maxlen=REWARDS_KEPT)
        self._first_evaluation: EvalReport | None = None
        self._evaluations: deque[EvalReport] = deque(maxlen=EVALUATIONS_KEPT)
        self._latest: StepMetrics | None = None
        self._sample: Sample | None = None

    async def run(self) -> None:
        """Work until everyone who reports has ended."""
        async with self._inbox:
            try:
                self._show(start=True)
                async for report in self._inbox:
                    await self._observe(report)
                for early in self._early.values():
                    await self._write_evaluation(early)
            except Exception:
                log.error("monitor_failed", exc_info=True)
                self.recorded.close()
                async for _ in self._inbox:
                    pass
                raise
            finally:
                self.recorded.close()
                self._display.close()
                for writer in (self._metrics, self._rollouts):
                    if writer is not None:
                        writer.close()

    async def _observe(self, report: StepReport | GroupsEnded | EvalReport) -> None:
        match report:
            case StepReport():
                await self._write_step(report)
            case GroupsEnded():
                await self._write_ended(report)
            case EvalReport():
                if self._first_evaluation is None:
                    self._first_evaluation = report
                else:
                    self._evaluations.append(report)
                if report.step > self._step and len(self._early) < EARLY_KEPT:
                    self._early[report.step] = report
                else:
                    await self._write_evaluation(report)
        self._show()

    async def _write_step(self, report: StepReport) -> None:
        now = Moment(seconds=self._seconds_before + self._clock() - self._began, gauges=self._gauges())
        metrics = step_metrics(report, now=now, before=self._last, ended_early=self._ended_early)
        self._ended_early.clear()
        self._last, self._step = now, report.step
        self._remember(report, metrics)
        if self._rollouts is not None:
            await self._keep(self._rollouts, rollout_records(report))
        await self._keep(self._metrics, [metrics])
        self.recorded.put(report.step)
        for step in [step for step in self._early if step <= report.step]:
            await self._write_evaluation(self._early.pop(step))

    async def _write_ended(self, report: GroupsEnded) -> None:
        self._discarded.update(group.reason for group in report.discarded)
        if self._rollouts is not None:
            await self._keep(self._rollouts, rollout_records(report))
        self._ended_early.update((group.prompt.source, group.reason) for group in report.discarded)

    async def _write_evaluation(self, report: EvalReport) -> None:
        fields = evaluation_fields(report)
        line = {
            "step": report.step,
            "policy_version": report.version,
            "seconds": self._seconds_before + self._clock() - self._began,
            **fields,
        }

        def write() -> None:
            last = self._metrics.last()
            if not (last and last.get("step") == report.step and self._metrics.extend_last(fields)):
                self._metrics.append(line)

        await self._attempt(self._metrics, write)

    async def _keep(self, writer: LineWriter, records: Iterable[Any]) -> None:
        def write() -> None:
            for record in records:
                writer.append(record)

        await self._attempt(writer, write)

    async def _attempt(self, writer: LineWriter, write: Callable[[], None]) -> None:
        """Write in a thread; a disk that is full or gone costs these lines, not the run."""
        try:
            await to_thread.run_sync(write)
        except OSError as error:
            self._failing[writer.path.name] += 1
            if self._failing[writer.path.name] == 1:
                log.warning("not_written", file=writer.path.name, error=error.strerror or str(error))
        else:
            if missed := self._failing.pop(writer.path.name, 0):
                log.warning("written_again", file=writer.path.name, reports_missed=missed)

    def _remember(self, report: StepReport, metrics: StepMetrics) -> None:
        self._latest = metrics
        self._trained += len(report.trained)
        self._discarded.update(group.reason for group in report.discarded)
        if metrics.reward_mean is not None:
            self._rewards.append(metrics.reward_mean)
        self._sample = sample(report) or self._sample

    def _show(self, *, start: bool = False) -> None:
        """Hand the view to the display; one that fails is closed, and the files go on."""
        try:
            if start:
                self._display.start()
            self._display.show(self._view())
        except Exception:
            log.warning("display_failed", exc_info=True)
            self._display, broken = NoDisplay(), self._display
            broken.close()

    def _view(self) -> RunView:
        first = () if self._first_evaluation is None else (self._first_evaluation,)
        return RunView(
            step=self._step,
            first_step=self._first_step,
            seconds=self._clock() - self._began,
            trained=self._trained,
            discarded=dict(self._discarded),
            rewards=tuple(self._rewards),
            evaluations=(*first, *self._evaluations),
            latest=self._latest,
            sample=self._sample,
        )
