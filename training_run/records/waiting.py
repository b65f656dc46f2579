"""What a run waits for."""

from __future__ import annotations

from msgspec import Struct

from training_run.profile.schema import Profile


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
