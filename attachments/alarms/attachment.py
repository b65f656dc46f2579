"""Checks of a run that its policy or its speed collapses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attachments.alarms.sections import COLLAPSE_DETECTION, CollapseChecks, RollBackOnCollapse, WarnOnCollapse
from training_run.profile.rules import Rule, custom_flow, from_clients

if TYPE_CHECKING:
    from protocols.finding import Finding
    from protocols.step import UpdateMetrics
    from training_run.directory.checkpoint_parts import CheckpointParts
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


MAY_CHANGE = ("collapse_detection",)
NO_EFFECT = (
    Rule(
        "collapse_detection.kl_high",
        lambda v, _: v["learner.kl_penalty.type"] == "off",
        'learner.kl_penalty = "off" means that no divergence is computed',
        "learner.kl_penalty.type",
    ),
    Rule(
        "collapse_detection.empty_format_high",
        lambda v, _: (
            not custom_flow(v) and (from_clients(v) or "format" not in {reward.name for reward in v["rewards"]})
        ),
        'no reward is named "format"',
        "rewards actors atropos.type sessions.type",
    ),
)


def memory(need: MemoryNeed) -> None:
    """Keep older policies for rollbacks."""
    if need.profile is not None and isinstance(COLLAPSE_DETECTION.of(need.profile), RollBackOnCollapse):
        need.rollbacks = True


async def prepare(plan: Plan) -> Attach | None:
    """Add the checks, and let updates be measured for the collapse detection."""
    settings = COLLAPSE_DETECTION.of(plan.profile)
    if isinstance(settings, CollapseChecks):
        plan.measured_updates = max(plan.measured_updates, settings.patience)

    async def attach(run: RunContext) -> None:
        """Add the checks, and the hooks of the collapse detection."""
        from attachments.alarms.checks import CollapseCheck, CutCheck, ExpertCheck, RouteCheck, ThroughputCheck
        from attachments.alarms.hooks import detect_collapses, keep_state
        from clotho.lanes.compute_thread import finish

        run.findings.add_check(CollapseCheck())
        run.findings.add_check(CutCheck(plan.profile.learner.objective))
        run.findings.add_check(ExpertCheck())
        run.findings.add_check(RouteCheck())
        run.findings.add_check(ThroughputCheck())
        if isinstance(settings, CollapseChecks):
            await finish(run.compute.learner.submit(lambda: detect_collapses(run, settings)))
        else:
            keep_state(run)

    return attach


def described(parts: CheckpointParts) -> Mapping[str, Any]:
    """Return the number of rollbacks."""
    from attachments.alarms.collapse_detection import NAME, AlarmsState

    saved = parts.saved(NAME, AlarmsState)
    return {"rollbacks": saved.value.rollbacks if saved else 0}


def rehearsed(profile: Profile, updates: Sequence[UpdateMetrics]) -> Iterable[Finding]:
    """Compare the updates with the limit of the collapse detection, also if the run goes without it."""
    from attachments.alarms.rehearsal import large_updates

    settings = COLLAPSE_DETECTION.of(profile)
    return large_updates(updates, settings if isinstance(settings, CollapseChecks) else WarnOnCollapse())
