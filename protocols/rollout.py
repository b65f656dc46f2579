"""Generator -> scorer: the completions of one prompt; and what becomes of a group that is never trained on."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocols.prompt import Prompt
from protocols.sampling import Completion


class RolloutGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Generator -> scorer. All completions of one prompt; at least one."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def oldest_version(self) -> int:
        """The oldest weights that drew any token of the group."""
        return min(version for completion in self.completions for version in completion.versions)


DiscardReason = Literal[
    "no_signal",
    "stale",
    "reward_error",
    "generation_error",
    "invalid",
    "not_finite",
    "duplicate",
    "surplus",
    "lost",
]


class Discarded(Struct, frozen=True, kw_only=True, tag=True):
    """Any actor -> learner, on the arrow the group would have taken. The group ends here, counted, never trained on.

    no_signal: nothing to learn, as where all rewards are equal; stale: older than `learner.max_staleness`, or than the
    policy that was gone back to; reward_error: a reward raised, hung or returned no number; generation_error: the
    engine failed it; invalid: refused on inspection; not_finite: its update was not finite and was skipped; duplicate:
    an environment sent it before; surplus: it came after the last batch of the run; lost: an environment sent it to an
    earlier life of the run, which ended before it was learned from. rewards, parts: as of a `ScoredGroup`, where it was
    scored.
    """

    prompt: Prompt
    reason: DiscardReason
    detail: str
    completions: tuple[Completion, ...] = ()
    rewards: tuple[float, ...] = ()
    parts: dict[str, tuple[float | None, ...]] = {}
