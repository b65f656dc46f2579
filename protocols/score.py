"""Scorer -> learner: a group with its rewards."""

from __future__ import annotations

from msgspec import Struct

from protocols.rollout import Discarded, RolloutGroup


class ScoredGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Scorer -> learner. `rewards[i]` is the weighted sum for completion i; finite.

    parts: per reward function, its value for each completion (None where it did not apply).
    token_advantages: per completion and token, where an environment gives them (`learner.advantage = "environment"`);
        otherwise empty.
    """

    group: RolloutGroup
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float | None, ...]]
    token_advantages: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        """Refuse rewards that do not match the completions one to one."""
        if len(self.rewards) != len(self.group.completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(self.group.completions)} completions")
        if self.token_advantages and [len(row) for row in self.token_advantages] != [
            len(completion.tokens) for completion in self.group.completions
        ]:
            raise ValueError("token_advantages must have one number for each token of each completion")


GroupOutcome = ScoredGroup | Discarded
