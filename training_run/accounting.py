"""Group accounting: the number of prompted groups, and the place of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog

from protocols.accounting import Balance, EnvironmentGroupSource, GroupSource
from protocols.checkpoint import RunState
from protocols.step import PolicyUpdated
from training_run.groups.ledger import Ledger
from training_run.records.evaluation_history import evaluated_steps
from training_run.run import RunContext
from training_run.supervision.queues import Queue
from training_run.supervision.supervisor import Runnable

log = structlog.get_logger(actor="pipeline")


class GroupAccounting:
    """Combines the group source, the learner's ledger, and the queues between the two."""

    def __init__(self, context: RunContext, source: GroupSource, queues: Sequence[Queue[Any]]) -> None:
        """queues: those that groups pass between the source and the learner."""
        self._context, self._source, self._queues = context, source, queues

    @property
    def prompted(self) -> int:
        """Number of groups prompted since the run began."""
        return self._source.prompted_until

    @property
    def received(self) -> dict[str, int]:
        """Number of groups received from each environment since the run began."""
        return dict(self._source.received) if isinstance(self._source, EnvironmentGroupSource) else {}

    def in_flight(self, ledger: Ledger) -> dict[int, str]:
        """Environment of each received group that has not ended according to the ledger, by group id.

        The source remembers a limited number of groups. The environments of older groups follow from the counts: each
        environment has as many groups in flight as it has sent and has not ended.
        """
        if not isinstance(self._source, EnvironmentGroupSource) or not self._source.in_flight:
            return {}
        sources = self._source.in_flight
        unended = list(ledger.unended(self.prompted))
        forgotten = Counter(self.received)
        forgotten.subtract({name: counts.ended for name, counts in ledger.state().sources.items()})
        forgotten.subtract(sources[group_id] for group_id in unended if group_id in sources)
        names = forgotten.elements()
        return {group_id: sources[group_id] if group_id in sources else next(names, "") for group_id in unended}

    def balance(self, *, complete: bool) -> Balance:
        """The conservation equation.

        complete: every actor has returned. Groups that have not ended are then in a queue, or were prompted before a
        restart and are not part of this run, which has fewer steps. If a run was stopped, all groups that have not
        ended are carried over: a resumed run prompts them again, or counts them as lost if environments sent them.
        """
        ledger, prompted = self._context.ledger, self.prompted
        unended = list(ledger.unended(prompted))
        if complete:
            in_queues = sum(queue.depth for queue in self._queues)
            carried_over = in_queues + sum(group_id >= self._source.sent_until for group_id in unended)
        else:
            carried_over = len(unended)
        waiting = Counter(() if complete else self.in_flight(ledger).values())
        ended = {name: counts.ended for name, counts in ledger.state().sources.items()}
        return ledger.balance(prompted, carried_over, received=ended | self.received, waiting=waiting)

    def run_state(self, update: PolicyUpdated) -> RunState:
        """The part of a checkpoint that is not tensors."""
        before, stats = self._context.start.state, self._context.sampler.engine.stats()
        return RunState(
            step=update.report.step,
            version=update.report.version,
            fingerprint=update.report.fingerprint,
            ledger=update.ledger,
            prompted=self.prompted,
            random_state=update.random_state,
            bad_steps=update.bad_steps,
            train_seconds=update.train_seconds,
            sampled_tokens=stats.tokens_sampled + (before.sampled_tokens if before else 0),
            trained_tokens=update.trained_tokens,
            inputs=self._context.inputs,
            received=self.received,
            in_flight=self.in_flight(Ledger(update.ledger)),
            evaluated=evaluated_steps(self._context.directory.evaluations, until=update.report.step),
        )


class CountedSource:
    """Adapts a custom actor to GroupSource by counting the messages that the actor has sent."""

    def __init__(self, context: RunContext, actor: Runnable, queue: Queue[Any]) -> None:
        """queue: the first queue behind the actor."""
        self._name, self._queue = actor.name, queue
        self._ended_before = context.start.state.ledger.ended if context.start.state else 0
        self.sent_until = context.total_groups

    @property
    def prompted_until(self) -> int:
        """Number of groups that had ended before the last start, plus the groups sent since the last start."""
        return self._ended_before + self._queue.stats().sent

    def drain(self) -> None:
        """Log that draining is not supported."""
        log.warning("drain_not_supported", source=self._name, hint="press Ctrl-C again to stop the run")


def group_source(context: RunContext, actor: Runnable, queue: Queue[Any]) -> GroupSource:
    """The actor itself if it implements GroupSource. queue: the first queue behind the actor."""
    return actor if isinstance(actor, GroupSource) else CountedSource(context, actor, queue)
