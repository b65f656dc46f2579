"""Checks of a run that its policy or its speed collapses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attachments.alarms.sections import COLLAPSE_DETECTION, CollapseChecks, RollBackOnCollapse
from training_run.attachment import Attach, Attachment, Plan
from training_run.profile.rules import Rule, custom_flow, has_environments

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.run import RunContext


class Alarms(Attachment):
    """The checks of every run, and `collapse_detection` of its profile."""

    may_change = ("collapse_detection",)
    no_effect = (
        Rule(
            "collapse_detection.kl_high",
            lambda v, _: v["learner.kl_penalty.type"] == "none",
            'learner.kl_penalty = "none" means that no divergence is computed',
            "learner.kl_penalty.type",
        ),
        Rule(
            "collapse_detection.empty_format_high",
            lambda v, _: (
                not custom_flow(v) and (has_environments(v) or "format" not in {reward.name for reward in v["rewards"]})
            ),
            'no reward is named "format"',
            "rewards actors atropos.type",
        ),
    )

    def memory(self, need: MemoryNeed) -> None:
        """Keep older policies for rollbacks."""
        if need.profile is not None and isinstance(COLLAPSE_DETECTION.of(need.profile), RollBackOnCollapse):
            need.rollbacks = True

    async def prepare(self, plan: Plan) -> Attach | None:
        """Measure updates, keep older policies, and add the checks."""
        settings = COLLAPSE_DETECTION.of(plan.profile)
        if isinstance(settings, CollapseChecks):
            plan.measured_updates = settings.patience
        if isinstance(settings, RollBackOnCollapse):
            plan.rollback_window = settings.window

        async def attach(run: RunContext) -> None:
            from attachments.alarms.checks import CollapseCheck, ThroughputCheck

            run.findings.add_check(CollapseCheck())
            run.findings.add_check(ThroughputCheck())

        return attach


ATTACHMENT = Alarms()
