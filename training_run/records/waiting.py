"""Where the groups of a run are, and what its learner waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from training_run.profile.schema import Profile
from training_run.supervision.queues import Queue

if TYPE_CHECKING:
    from training_run.run import RunContext


class GroupStages(Struct, frozen=True, kw_only=True):
    """Number of groups in flight by place: not started, at the generator, at the scorer, at the learner."""

    queued: int = 0
    decoding: int = 0
    scoring: int = 0
    waiting: int = 0


def waits_for(profile: Profile, step: int, groups: GroupStages, receiver: str) -> str:
    """Return what the learner waits for. receiver: an actor that has not taken the last update yet."""
    if step >= profile.steps:
        return "the last evaluation and checkpoint"
    if groups.waiting >= profile.learner.batch_size and receiver:
        return f"the {receiver}, which has not taken the last update yet"
    if groups.decoding:
        return "groups that are decoded"
    if groups.scoring:
        return "rewards of groups"
    return "prompts" if groups.queued else "groups"


class GroupsInFlight:
    """Counts the groups of a run by their place. Its methods may be called in any thread."""

    def __init__(self, context: RunContext, queues: Sequence[Queue[Any]]) -> None:
        """queues: all queues of the run, those of a channel in the order in which messages pass them."""
        self._context, self._queues = context, queues
        self._ended_before = context.ledger.ended

    def waiting_for(self, stages: GroupStages | None = None) -> str:
        """Return what the learner waits for. stages: where the groups in flight are."""
        context, prefix = self._context, "updates."
        full = (one.name for one in self._queues if one.name.startswith(prefix) and one.depth >= one.capacity)
        receiver = next(full, "").removeprefix(prefix)
        return waits_for(context.profile, context.progress.step, stages or self.stages(), receiver)

    def stages(self) -> GroupStages:
        """Return where the groups in flight are."""
        channels = defaultdict[str, list[Queue[Any]]](list)
        for queue in self._queues:
            name, _, part = queue.name.partition(".")
            if not part.startswith("tap") or part == "tapped":  # copies for taps do not belong to the flow
                channels[name].append(queue)
        sent = {name: queues[0].sent for name, queues in channels.items()}
        taken = channels["prompts"][-1].received if "prompts" in sent else 0
        sampled, scored = sent.get("rollouts", 0), sent.get("scored", 0)
        ended = self._context.ledger.ended - self._ended_before
        return GroupStages(
            queued=max(0, sent.get("prompts", 0) - taken),
            decoding=max(0, taken - sampled),
            scoring=max(0, sampled - scored),
            waiting=max(0, scored - ended),
        )
