"""What takes part in a run beside its actors: hooks of the updates, checks and observers of the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from protocols.errors import ClothoError
from protocols.evaluation import EvalReport
from protocols.finding import Finding
from protocols.rollout import Discarded, ScoredGroup
from protocols.step import GroupsEnded, StepReport, TrainedGroup
from protocols.summary import RunGauges

if TYPE_CHECKING:
    from clotho.training.learner_state import LearnerSnapshot


class Verdict(Struct, frozen=True, kw_only=True, eq=False):
    """What a hook makes of a batch.

    findings: what it has found. error: ends the run after this batch; None: the run goes on. back_to: what the learner
    returns to; None: it keeps its weights. rate: factor of the learning rates after that.
    """

    findings: tuple[Finding, ...] = ()
    error: ClothoError | None = None
    back_to: LearnerSnapshot | None = None
    rate: float = 1.0


class UpdateHook:
    """Takes part in the updates of the learner. Every method adds nothing by default.

    They are called in the order below, and in the event loop unless they say otherwise.
    """

    def extra(self, *, step: int, version: int) -> Sequence[ScoredGroup]:
        """Return groups to train on beside those of a batch that has any. They have ended, and do not end again.

        step: number of batches before this one. version: the policy version before the update.
        """
        return ()

    def judged(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Return the fresh groups of a batch as the learner trains on them, such as with advantages per token.

        Called in the learner's thread, before the update of a batch that has any.
        """
        return groups

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Take groups into account that have ended; also called between two batches. version: the policy's now."""

    def metrics(self) -> Mapping[str, Any]:
        """Return the values of a step for metrics.jsonl, with names of `Attachment.metrics`.

        Called once for every batch, when its groups have ended.
        """
        return {}

    def assess(self, report: StepReport) -> Verdict:
        """Assess a batch."""
        return Verdict()

    def rolled_back(self) -> None:
        """Forget what depends on updates: the policy is an earlier one again."""


class Chooser:
    """Chooses the problem of every group, in the place of the order of the dataset.

    waits: whether a group is prompted only when it may start, because the choice depends on groups that have ended.
    """

    waits = False

    def choose(self, group_id: int) -> int:
        """Return the index of the problem of a group."""
        raise NotImplementedError


Measure = Callable[[float], Mapping[str, Any]]
"""Returns values of metrics for the next line of metrics.jsonl; its argument is the time since the last line."""


class Check:
    """Examines what a run reports. Its findings apply from the moment in which they are yielded until they are not."""

    def observe(self, report: StepReport, gauges: RunGauges) -> None:
        """Take a step into account. gauges: the state of the run at this moment."""

    def findings(self) -> Iterable[Finding]:
        """Return the findings that apply now."""
        return ()


class ReportObserver:
    """Is told by the monitor what it has seen. Every method does nothing by default, and returns at once.

    name: what `write` writes, in a warning that it failed.
    """

    name = "observer"

    def step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        """Take a step into account. line: its line of metrics.jsonl."""

    def groups(self, report: GroupsEnded) -> None:
        """Take groups into account that ended between two steps."""

    def evaluation(self, report: EvalReport) -> None:
        """Take an evaluation into account."""

    def finding(self, step: int, finding: Finding) -> None:
        """Take a finding into account that has begun."""

    def write(self) -> None:
        """Do the slow work for the last report. Called in a worker thread after every report, and at the end.

        An OSError is reported once, and the run continues; so is the first write that succeeds afterwards.
        """
