"""Scorer -> learner: a group with its rewards."""

from __future__ import annotations

from msgspec import Struct

from protocols.rollout import Discarded, RolloutGroup


class ScoredGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Scorer -> learner. `rewards[i]` is the weighted sum for completion i; finite.

    parts: per reward function, its value for each completion (None where it did not apply).
    """

    group: RolloutGroup
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float | None, ...]]

    def __post_init__(self) -> None:
        """Refuse rewards that do not match the completions one to one."""
        if len(self.rewards) != len(self.group.completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.group.completions)} completions")


GroupOutcome = ScoredGroup | Discarded
