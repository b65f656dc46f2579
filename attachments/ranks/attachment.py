"""The ranks of a data-parallel learner: processes of `mlx.launch` that compute shares of every gradient."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attachments.ranks.sections import DISTRIBUTED

if TYPE_CHECKING:
    from attachments.ranks.learner_ranks import LearnerRanks
    from attachments.ranks.membership import Membership
    from attachments.ranks.sections import DistributedSection
    from training_run.memory.need import MemoryNeed
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


RANK_METRICS = {
    "positions": "Positions of its micro-batches, padding included.",
    "seconds": "Seconds between its shares and their results; at rank 0, with the decode steps in this time.",
    "positions_per_second": "Positions per second; null without a share.",
    "bytes_sent": "Bytes of weights and shares that rank 0 has sent it.",
}
"""Every key of an entry of `learner_ranks`."""


MAY_CHANGE = ("distributed",)
METRICS: Mapping[str, str] = {
    "learner_ranks": "Work of each rank of a data-parallel learner since the line before, by number of the rank; "
    "null without other ranks.",
    "time/wait_for_ranks": "Seconds that rank 0 waited for the shares of other ranks and for sums of gradients "
    "since the line before; null without other ranks.",
}
ENTRIES: Mapping[str, Mapping[str, str]] = {"learner_ranks": RANK_METRICS}


def launch(argv: Sequence[str]) -> int | None:
    """Run the supervisor of a rank, or a rank other than 0; None for rank 0, and for a single process."""
    from attachments.ranks import supervision

    if not supervision.has_other_ranks(os.environ):
        return None
    if not supervision.is_rank():
        return supervision.supervise(argv)
    return None if supervision.rank() == 0 else _run_rank()


def memory(need: MemoryNeed) -> None:
    """Sums of gradients, in the process of a rank."""
    from attachments.ranks.supervision import is_rank

    need.sums = need.profile is not None and is_rank()


def shown(line: Mapping[str, Any]) -> Iterable[str]:
    """Return the speed of each rank."""
    if not line.get("learner_ranks"):
        return ()
    from attachments.ranks.gauges import shown

    return shown(line)


async def prepare(plan: Plan) -> Attach | None:
    """Join the other ranks. They load the model when this process has loaded it."""
    from attachments.ranks.supervision import is_rank

    if not is_rank():
        return None
    from anyio.to_thread import run_sync

    ranks = await run_sync(_join, DISTRIBUTED.of(plan.profile))
    plan.ending.callback(ranks.close)
    plan.ranks = ranks

    async def attach(run: RunContext) -> None:
        """Send model and settings to the other ranks, and let the run show their work."""
        model, parameters = run.inputs["model"], run.policy_learner.parameters
        memory_bytes = run.memory.minimum
        ranks.resumable(str(run.directory.path))
        await run_sync(lambda: ranks.set_up(run.profile, parameters, model=model, memory_bytes=memory_bytes))
        from attachments.ranks.gauges import measured, rank_metrics

        run.attached.measures.append(measured(ranks.gauges))
        run.attached.metrics.append(lambda: rank_metrics(ranks.gauges()))

    return attach


def _run_rank() -> int:
    """Run a rank other than 0, and end the process; the exit status if that fails."""
    from training_run.main import before_mlx
    from training_run.supervision.process_signals import process_signals

    before_mlx()
    from attachments.ranks.worker import run_rank
    from training_run.records.failure_report import report

    try:
        process_signals.exit(run_rank())
    except Exception as error:
        return report(error)


def _join(settings: DistributedSection) -> LearnerRanks:
    """Join the other ranks of a data-parallel learner, in a thread."""
    from attachments.ranks.learner_ranks import LearnerRanks
    from attachments.ranks.membership import Membership
    from training_run.supervision.process_signals import process_signals

    def join(receive: Callable[[int, bytes], None]) -> Membership:
        return Membership(settings, receive=receive, exit_process=process_signals.exit)

    ranks = LearnerRanks(join, share_seconds=settings.share_seconds, shares=settings.shares)
    process_signals.before_exit(ranks.close)
    return ranks
