"""The collapse detection in a run: assesses updates, and lets the learner return to the last healthy policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import structlog

from attachments.alarms.collapse_detection import NAME, AlarmsState, CollapseDetector
from attachments.alarms.sections import CollapseChecks, RollBackOnCollapse, WarnOnCollapse
from clotho.models.parameters import Arrays, flat, nested
from clotho.settings.learner import LearnerSection
from clotho.training.learner_state import LearnerSnapshot, state_arrays, state_from_arrays, with_prefix
from clotho.training.optimizers import PLAIN, StepRule
from protocols.checkpoint import Part
from protocols.errors import CollapseError
from protocols.finding import Finding
from protocols.step import StepReport
from training_run.run import RunContext
from training_run.supervision.hooks import UpdateHook, Verdict

SNAPSHOTS = ("healthy", "candidate")


class RollbackPolicy:
    """Keeps a policy after which training stayed healthy for a number of updates.

    After every `window` healthy updates the candidate becomes the healthy policy, and the newest policy becomes the
    candidate: a rollback returns to a policy that was followed by `window` to 2 `window` healthy updates. At first both
    are the initial policy.
    """

    def __init__(self, start: LearnerSnapshot, *, window: int) -> None:
        self.window = window
        self._healthy = self._candidate = start
        self.healthy_updates = 0

    def observe(self, newest: LearnerSnapshot, *, healthy: bool) -> None:
        """Record one applied update and whether its batch looked healthy; other updates do not count."""
        if not healthy:
            return
        self.healthy_updates += 1
        if self.healthy_updates % self.window == 0:
            self._healthy, self._candidate = self._candidate, newest

    def roll_back(self) -> LearnerSnapshot:
        """Return the healthy policy, and start counting again from it."""
        self._candidate = self._healthy
        self.healthy_updates = 0
        return self._healthy

    def arrays(self) -> Arrays:
        """Name all arrays for a checkpoint."""
        named: Arrays = {}
        for which, snapshot in zip(SNAPSHOTS, (self._healthy, self._candidate), strict=True):
            named |= {f"{which}.parameters.{name}": array for name, array in flat(snapshot.parameters).items()}
            named |= {f"{which}.state.{name}": array for name, array in state_arrays(snapshot.state).items()}
            named |= {f"{which}.reference.{name}": array for name, array in snapshot.reference.items()}
        return named

    def restore(
        self,
        arrays: Mapping[str, mx.array],
        *,
        healthy_updates: int,
        settings: LearnerSection,
        rule: StepRule = PLAIN,
    ) -> None:
        """Restore what `arrays` named. settings, rule: of the learner.

        Raises ValueError, and changes nothing, if it does not fit the policy, its optimizer and its reference policy.
        """
        start = flat(self._healthy.parameters)
        snapshots = []
        for which in SNAPSHOTS:
            parameters, reference = (with_prefix(arrays, f"{which}.{kind}.") for kind in ("parameters", "reference"))
            if _shapes(parameters) != _shapes(start):
                raise ValueError(f"the {which} policy of the checkpoint does not fit the trainable parameters")
            if _shapes(reference) != _shapes(self._healthy.reference):
                raise ValueError(f"the {which} policy of the checkpoint has another kind of reference policy")
            state = state_from_arrays(with_prefix(arrays, f"{which}.state."), start, settings, rule)
            snapshots.append(LearnerSnapshot(nested(parameters), state, reference))
        self.healthy_updates = healthy_updates
        self._healthy, self._candidate = snapshots


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


log = structlog.get_logger(actor="learner")


class CollapseHook(UpdateHook):
    """Assesses every batch, and decides the response that the type of `[collapse_detection]` configures."""

    def __init__(
        self,
        settings: CollapseChecks,
        saved: AlarmsState,
        *,
        snapshot: Callable[[], LearnerSnapshot],
        rollback: RollbackPolicy | None = None,
    ) -> None:
        """saved: from the checkpoint of a resumed run. snapshot: returns the learner at this moment.

        rollback: what is returned to; None: nothing is.
        """
        self._settings, self._detector = settings, CollapseDetector(settings, saved.collapse)
        self.rollbacks, self._tripped = saved.rollbacks, False
        self._snapshot, self._rollback = snapshot, rollback

    def assess(self, report: StepReport) -> Verdict:
        """Return the findings on a batch, and what the settings do about them.

        A rollback also resets the baseline statistics. After `max_rollbacks` of them the run ends.
        """
        found, settings, rollback = self._detector.observe(report), self._settings, self._rollback
        first, self._tripped = found.tripped and not self._tripped, found.tripped
        if first:
            log.warning("collapse_detected", step=report.step, findings=_facts(found.findings))
        acts = found.tripped and not isinstance(settings, WarnOnCollapse)
        if acts and rollback and isinstance(settings, RollBackOnCollapse) and self.rollbacks < settings.max_rollbacks:
            self.rollbacks, self._tripped = self.rollbacks + 1, False
            self._detector.reset()
            return Verdict(findings=found.findings, back_to=rollback.roll_back(), rate=settings.rollback_rate)
        if rollback and report.update is not None and report.update.update_applied:
            rollback.observe(self._snapshot(), healthy=found.healthy)
        return Verdict(findings=found.findings, error=self._error(report.step, found.findings) if acts else None)

    def _error(self, step: int, findings: Sequence[Finding]) -> CollapseError:
        """Return the error that ends the run at a step with these findings."""
        rollbacks = f" after {self.rollbacks} rollbacks (collapse_detection.max_rollbacks)" if self.rollbacks else ""
        return CollapseError(
            f"the policy collapsed at step {step}{rollbacks}: {_facts(findings)}. The "
            "findings above have the command that continues from an earlier checkpoint; or change collapse_detection"
        )

    def part(self) -> Part[AlarmsState]:
        """Return what a checkpoint keeps: the statistics, and the policies of rollbacks."""
        kept = self._rollback
        state = AlarmsState(
            collapse=self._detector.state(),
            rollbacks=self.rollbacks,
            healthy_updates=kept.healthy_updates if kept else 0,
        )
        return Part(value=state, arrays=kept.arrays() if kept else {})


def _facts(findings: Sequence[Finding]) -> str:
    return "; ".join(finding.fact for finding in findings)


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
    hook = CollapseHook(settings, state, snapshot=learner.snapshot, rollback=rollback)
    run.attached.hooks.append(hook)
    parts.save(NAME, hook.part)


def keep_state(run: RunContext) -> None:
    """Keep the statistics of the checkpoint in those of a run that has switched the detection off."""
    parts = run.attached.parts
    if saved := parts.saved(NAME, AlarmsState):
        part = Part(value=AlarmsState(collapse=saved.value.collapse, rollbacks=saved.value.rollbacks))
        parts.save(NAME, lambda: part)
