"""The settings of the replay buffer in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from clotho.settings.bounds import Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting

Priority = Literal["advantage", "recency"]


class UniformReplay(Variant, frozen=True, kw_only=True, tag="uniform"):
    """Groups are sampled at random."""


class ReplayPriority(Variant, frozen=True, kw_only=True):
    """Groups are preferred by a priority."""

    priority: Annotated[Priority, about("Priority of a group: its mean |advantage|, or its age.")] = "advantage"


class PriorityReplay(ReplayPriority, frozen=True, kw_only=True, tag="priority"):
    """The groups with the highest priority are replayed."""


class WeightedReplay(ReplayPriority, frozen=True, kw_only=True, tag="weighted"):
    """Groups are sampled in proportion to priority ** exponent."""

    exponent: Annotated[PositiveFloat, about("Exponent of the priority in weighted sampling.")] = 1.0


ReplaySampling = UniformReplay | PriorityReplay | WeightedReplay


class BufferedReplay(Variant, frozen=True, kw_only=True, tag="buffer"):
    """Groups are kept after an update and trained on again."""

    capacity: Annotated[Positive, about("Number of groups that the replay buffer keeps.")] = 64
    groups: Annotated[Positive, about("Number of replayed groups that are added to each update.")] = 4
    sampling: Annotated[ReplaySampling, about("How replayed groups are chosen.")] = UniformReplay()
    max_age: Annotated[Positive, about("Age in policy versions at which a group leaves the buffer.")] = 16


ReplaySection = Annotated[Off | BufferedReplay, about("Groups that are trained on more than once.")]

REPLAY = Setting[Off | BufferedReplay](
    path="replay", kind=ReplaySection, default=Off(), attachment="replay", after="learner"
)

SETTINGS = (REPLAY,)
