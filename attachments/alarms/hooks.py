"""The collapse detection in a run: assesses every update, and lets the learner return to a healthy policy."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import structlog

from attachments.alarms.collapse_detection import CollapseMonitor
from attachments.alarms.rollback import RollbackPolicy
from attachments.alarms.sections import CollapseChecks, RollBackOnCollapse
from attachments.alarms.state import NAME, AlarmsState
from clotho.training.learner_state import LearnerSnapshot
from protocols.checkpoint import Part
from protocols.step import StepReport
from training_run.run import RunContext
from training_run.supervision.hooks import UpdateHook, Verdict

log = structlog.get_logger(__name__)


class CollapseHook(UpdateHook):
    """Gives the verdict of the collapse detection on every batch."""

    def __init__(
        self,
        monitor: CollapseMonitor,
        *,
        snapshot: Callable[[], LearnerSnapshot],
        rollback: RollbackPolicy | None = None,
    ) -> None:
        """snapshot: returns the learner at this moment. rollback: what is returned to; None: nothing is."""
        self._monitor, self._snapshot, self._rollback = monitor, snapshot, rollback

    def assess(self, report: StepReport) -> Verdict:
        """Return the findings on a batch, and what the settings do about them."""
        response = self._monitor.assess(report)
        findings = response.findings
        if response.action == "rollback":
            assert self._rollback is not None
            rate = self._monitor.rollback_rate
            return Verdict(findings=findings, back_to=self._rollback.roll_back(), rate=rate)
        if self._rollback is not None and report.update is not None and report.update.update_applied:
            self._rollback.observe(self._snapshot(), healthy=not findings)
        error = self._monitor.error(report.step, findings) if response.action == "stop" else None
        return Verdict(findings=findings, error=error)

    def part(self) -> Part[AlarmsState]:
        """Return what a checkpoint keeps: the statistics, and the policies of rollbacks."""
        kept = self._rollback
        state = AlarmsState(
            collapse=self._monitor.state(),
            rollbacks=self._monitor.rollbacks,
            healthy_updates=kept.healthy_updates if kept else 0,
        )
        return Part(value=state, arrays=kept.arrays() if kept else {})


def detect_collapses(run: RunContext, settings: CollapseChecks) -> None:
    """Assess every update of a run that has not begun, from the state of its checkpoint on; in the learner's thread."""
    parts, learner = run.attached.parts, run.policy_learner
    saved = parts.saved(NAME, AlarmsState) or Part(value=AlarmsState())
    state, rollback = saved.value, None
    if isinstance(settings, RollBackOnCollapse):
        rollback = RollbackPolicy(learner.snapshot(), window=settings.window)
        if saved.arrays:  # none if earlier starts of the run kept no policies
            try:
                rollback.restore(
                    saved.arrays,
                    healthy_updates=state.healthy_updates,
                    settings=run.profile.learner,
                    rule=learner.rule,
                )
            except ValueError as error:  # a fork may have another optimizer
                log.warning("rollback_starts_anew", reason=str(error))
        mx.eval(rollback.arrays())
    monitor = CollapseMonitor(settings, state=state.collapse, rollbacks=state.rollbacks)
    hook = CollapseHook(monitor, snapshot=learner.snapshot, rollback=rollback)
    run.attached.hooks.append(hook)
    parts.save(NAME, hook.part)


def keep_state(run: RunContext) -> None:
    """Keep the statistics of the checkpoint in those of a run that has switched the detection off."""
    parts = run.attached.parts
    if saved := parts.saved(NAME, AlarmsState):
        part = Part(value=AlarmsState(collapse=saved.value.collapse, rollbacks=saved.value.rollbacks))
        parts.save(NAME, lambda: part)
