"""The values of each token of a run, which its page shows: measured in updates and written by an observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from protocols.step import GroupsEnded, StepReport
from training_run.attachment import Attach, Attachment, Plan
from training_run.supervision.hooks import ReportObserver

if TYPE_CHECKING:
    from attachments.dashboard.token_values import TokenValueWriter
    from training_run.run import RunContext


class WrittenTokenValues(ReportObserver):
    """Passes the groups of reports to a writer. A step writes those that ended before it too."""

    def __init__(self, writer: TokenValueWriter) -> None:
        self.name = writer.path.name
        self._writer = writer
        self._reports: list[StepReport | GroupsEnded] = []

    def step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        """Take the groups of a step into account."""
        self._reports.append(report)

    def groups(self, report: GroupsEnded) -> None:
        """Take groups into account that ended between two steps."""
        self._reports.append(report)

    def write(self) -> None:
        """Write the file of the step. Raises OSError if the disk refuses; its values are lost."""
        reports, self._reports = self._reports, []
        for report in reports:
            self._writer.add(report)
        if self._writer.pending:
            self._writer.write()


class Dashboard(Attachment):
    """`monitor.token_values_mb` of a profile."""

    async def prepare(self, plan: Plan) -> Attach | None:
        """Let updates return the values of their tokens."""
        limit = plan.profile.monitor.token_values_mb
        if not limit:
            return None
        plan.token_values = True

        async def attach(run: RunContext) -> None:
            from attachments.dashboard.token_texts import TokenTexts
            from attachments.dashboard.token_values import TokenValueWriter

            tokenizer = run.policy.tokenizer
            texts = TokenTexts(tokenizer, tokenizer.encode("a", add_special_tokens=False)[-1])
            writer = TokenValueWriter(run.directory.tokens, limit_bytes=limit << 20, texts=texts)
            run.attached.observers.append(WrittenTokenValues(writer))

        return attach


ATTACHMENT = Dashboard()
