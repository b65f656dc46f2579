"""Checks of a run that its policy or its speed collapses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training_run.attachment import Attach, Attachment, Plan

if TYPE_CHECKING:
    from training_run.run import RunContext


class Alarms(Attachment):
    """The checks of every run."""

    async def prepare(self, plan: Plan) -> Attach | None:
        """Add the checks."""

        async def attach(run: RunContext) -> None:
            from attachments.alarms.checks import CollapseCheck, ThroughputCheck

            run.findings.add_check(CollapseCheck())
            run.findings.add_check(ThroughputCheck())

        return attach


ATTACHMENT = Alarms()
