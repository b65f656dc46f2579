"""Monitor: writes metrics, evaluations and the rollout log, and updates the display."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import structlog
from anyio import to_thread
from msgspec.structs import replace

from protocols.evaluation import EvalReport
from protocols.queues import Inbox
from protocols.step import FirstBatch, GroupsEnded, LearnerReport, StepReport
from protocols.summary import Gauges
from training_run.directory.jsonl import JsonlWriter
from training_run.records.display import Display, RunView, sample
from training_run.records.findings import RunFindings
from training_run.records.forecast import RunForecast
from training_run.records.metrics import Measurement, step_metrics
from training_run.records.rollout_log import rollout_records
from training_run.records.solved import Solved, count_solved
from training_run.supervision.hooks import Measure, ReportObserver
from training_run.supervision.latest import Latest

log = structlog.get_logger(actor="monitor")

MAX_REWARDS = 512
"""Number of mean rewards that the view keeps."""

MAX_EVALUATIONS = 5
"""Number of evaluations that the view keeps, besides the first."""

SPEED_STEPS = 10
"""Number of steps whose mean speed the view has."""


class StepWork(NamedTuple):
    """Completion tokens of one or more steps, and the time of these steps."""

    tokens: int = 0
    seconds: float = 0.0


class Monitor:
    """Reads the reports of the learner and the evaluator.

    metrics.jsonl has one line per step, rollouts.jsonl one line per group, evaluations.jsonl one line per evaluation;
    each file is in order of `step`. An evaluation runs beside the training, so that its line may be written after the
    metrics of later steps; hence the separate file. Per-token values have one file per step.

    A file that cannot be written is reported once and attempted again with the next line. After any other failure the
    inbox is read to its end, so that no actor waits for the monitor. Then the failure is raised.

    logged: the last step whose lines were written; closed when no more lines will be written.
    """

    name = "monitor"

    def __init__(
        self,
        *,
        inbox: Inbox[LearnerReport | EvalReport],
        gauges: Gauges,
        display: Display,
        metrics: JsonlWriter,
        evaluations: JsonlWriter,
        rollouts: JsonlWriter | None,
        logged: Latest[int],
        findings: RunFindings,
        observers: Sequence[ReportObserver] = (),
        measures: Sequence[Measure] = (),
        forecast: RunForecast | None = None,
        first_step: int = 0,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """rollouts: None writes no rollout log. observers: of the reports. forecast: None shows no remaining time.

        measures: return values of further metrics. first_step, seconds_before: step and age of a resumed run.
        """
        self._inbox, self._gauges, self._display = inbox, gauges, display
        self._metrics_file, self._evaluations_file, self._rollouts_file = metrics, evaluations, rollouts
        self.logged, self._findings, self._observers, self._measures = logged, findings, observers, measures
        self._view, self._forecast = RunView(step=first_step), forecast
        self._seconds_before, self._clock, self._started_at = seconds_before, clock, clock()
        self._last = Measurement(seconds=seconds_before, gauges=replace(gauges(), findings=()))
        self._failed_writes: Counter[str] = Counter()
        self._discarded_between, self._failures_between = Counter[tuple[str, str]](), Counter[str]()
        self._solved_between = Counter[Solved]()
        self._work, self._all_work = deque[StepWork](maxlen=SPEED_STEPS), StepWork()
        self._known = set[str]()

    async def run(self) -> None:
        """Read reports until the inbox ends."""
        async with self._inbox:
            try:
                self._show(start=True)
                async for report in self._inbox:
                    await self._observe(report)
                await self._let_observers_write()
                self._show(has_ended=True)
            except Exception:
                log.error("monitor_failed", exc_info=True)
                self.logged.close()
                async for _ in self._inbox:
                    pass
                raise
            finally:
                self.logged.close()
                self._close(self._display)
                for writer in (self._metrics_file, self._evaluations_file, self._rollouts_file):
                    if writer is not None:
                        writer.close()

    async def _observe(self, report: LearnerReport | EvalReport) -> None:
        match report:
            case StepReport():
                await self._observe_step(report)
            case GroupsEnded():
                await self._observe_groups(report)
            case FirstBatch():
                self._findings.preview(report.groups)
                self._pass_findings(report.step)
                self.logged.put(self._view.step)
            case EvalReport():
                await self._observe_evaluation(report)
        self._show()

    async def _observe_step(self, report: StepReport) -> None:
        seconds, gauges = self._age(), self._gauges()
        self._findings.observe(report, gauges)
        now = Measurement(seconds=seconds, gauges=replace(gauges, findings=self._findings.now))
        metrics = step_metrics(
            report,
            now=now,
            before=self._last,
            measured=self._measured(seconds - self._last.seconds),
            discarded_between=self._discarded_between,
            failures_between=self._failures_between,
            solved_between=self._solved_between,
        )
        for counts in (self._discarded_between, self._failures_between, self._solved_between):
            counts.clear()
        self._work.append(StepWork(metrics["completion_length/total"], seconds - self._last.seconds))
        self._all_work = _summed([self._all_work, self._work[-1]])
        self._last, view, mean = now, self._view, metrics["reward/mean"]
        if self._forecast is not None:
            self._forecast.add_step(metrics)
        self._view = replace(
            view,
            step=report.step,
            trained=view.trained + len(report.trained),
            discarded=_with_reasons(view.discarded, report),
            rewards=view.rewards if mean is None else (*view.rewards, mean)[-MAX_REWARDS:],
            latest=metrics,
            sample=sample(report) or view.sample,
        )
        for observer in self._observers:
            observer.step(report, metrics)
        self._pass_findings(report.step)
        if self._rollouts_file is not None:
            await self._write(self._rollouts_file, rollout_records(report))
        if not await self._write(self._metrics_file, [metrics]):
            self._last = replace(now, gauges=replace(gauges, findings=()))
        self.logged.put(report.step)
        await self._let_observers_write()

    def _measured(self, seconds: float) -> dict[str, Any]:
        """Return the metrics of attachments. seconds: since the line before."""
        return {name: value for measure in self._measures for name, value in measure(seconds).items()}

    def _pass_findings(self, step: int) -> None:
        """Pass findings that began since the last call to the observers."""
        findings = {finding.name: finding for finding in self._findings.now}
        for name in findings.keys() - self._known:
            for observer in self._observers:
                observer.finding(step, findings[name])
        self._known = set(findings)

    async def _observe_groups(self, report: GroupsEnded) -> None:
        self._findings.observe(report, self._gauges())
        self._pass_findings(report.step)
        self._failures_between.update(name for group in report.discarded for name in group.failed_rewards)
        self._view = replace(self._view, discarded=_with_reasons(self._view.discarded, report))
        self._solved_between.update(count_solved(report.discarded))
        self._discarded_between.update((group.prompt.source, group.reason) for group in report.discarded)
        if self._rollouts_file is not None:
            await self._write(self._rollouts_file, rollout_records(report))
        for observer in self._observers:
            observer.groups(report)

    async def _observe_evaluation(self, report: EvalReport) -> None:
        first, *others = *self._view.evaluations, report
        self._view = replace(self._view, evaluations=(first, *others[-MAX_EVALUATIONS:]))
        if self._forecast is not None:
            self._forecast.add_evaluation(report)
        for observer in self._observers:
            observer.evaluation(report)
        await self._write(self._evaluations_file, [replace(report, run_seconds=self._age())])

    async def _write(self, file: JsonlWriter, records: Iterable[Any]) -> bool:
        """Append records to a file. Returns whether it has all of them."""

        def append() -> None:
            for record in records:
                file.append(record)

        return await self._attempt(file.path.name, append)

    async def _let_observers_write(self) -> None:
        for observer in self._observers:
            await self._attempt(observer.name, observer.write)

    async def _attempt(self, name: str, write: Callable[[], None]) -> bool:
        """Write in a worker thread. Returns whether it succeeded; if not, the data are lost and the run continues."""
        try:
            await to_thread.run_sync(write)
        except OSError as error:
            self._failed_writes[name] += 1
            if self._failed_writes[name] == 1:
                log.warning("write_failed", file=name, error=error.strerror or str(error))
            return False
        if failed := self._failed_writes.pop(name, 0):
            log.warning("write_recovered", file=name, failed_writes=failed)
        return True

    def _age(self) -> float:
        return self._seconds_before + self._clock() - self._started_at

    def _show(self, *, start: bool = False, has_ended: bool = False) -> None:
        """Pass the view to the display. A display that fails is closed, and the files are still written."""
        try:
            if start:
                self._display.start()
            age, work = self._age(), self._all_work if has_ended else _summed(self._work)
            self._view = replace(
                self._view,
                seconds=age - self._seconds_before,
                seconds_left=None if self._forecast is None else self._forecast.seconds_left(age),
                tokens_per_second=work.tokens / work.seconds if work.seconds > 0 else None,
                has_ended=has_ended,
            )
            self._display.show(self._view)
        except Exception:
            log.warning("display_failed", exc_info=True)
            self._display, failed = Display(), self._display
            self._close(failed)

    def _close(self, display: Display) -> None:
        try:
            display.close()
        except Exception:
            log.warning("display_not_closed", exc_info=True)


def _with_reasons(counts: Mapping[str, int], report: StepReport | GroupsEnded) -> dict[str, int]:
    """Return numbers of discarded groups by reason, with those of a report."""
    return dict(Counter(counts) + Counter(group.reason for group in report.discarded))


def _summed(steps: Iterable[StepWork]) -> StepWork:
    found = list(steps)
    return StepWork(sum(one.tokens for one in found), sum(one.seconds for one in found))
