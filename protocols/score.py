"""Scorer, or an environment -> learner: a group with its rewards."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion

ZERO_VARIANCE_THRESHOLD = 1e-6
"""A group is a zero-variance group if its rewards differ by at most this value. Such a group has no advantages."""


class TeacherTokens(Struct, frozen=True, kw_only=True):
    """What a teacher would say at each token of one completion: the same number K of alternatives everywhere.

    tokens, logprobs: (T, K), natural log under the teacher. Where T is a token that the policy did not draw the row
    counts for nothing.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class ScoredGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Scorer -> learner. `rewards[i]` is the weighted sum for completion i; finite.

    parts: per reward function, its value for each completion (None where it did not apply).

    What only an environment gives, and is empty elsewhere, has one entry per completion:
    token_advantages: per token; they take the place of what the rewards say (`learner.advantage`).
    reference_logprobs: per token, under the environment's reference policy (`learner.reference = "environment"`).
    temperatures: at which its tokens were sampled, above 0; empty: `sampling.temperature`.
    muted: its advantage is 0, though its reward counts among those of the group.
    teacher: alternatives to its tokens (`learner.distillation_weight`).
    logprob_error: the largest difference, in nats, between the log-probabilities that the environment passed on and
    those that the engine drew with; None where the engine does not remember.
    """

    group: RolloutGroup
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float | None, ...]]
    token_advantages: tuple[tuple[float, ...], ...] = ()
    reference_logprobs: tuple[tuple[float, ...], ...] = ()
    temperatures: tuple[float, ...] = ()
    muted: tuple[bool, ...] = ()
    teacher: tuple[TeacherTokens, ...] = ()
    logprob_error: float | None = None

    def __post_init__(self) -> None:
        """Refuse what does not match the completions one to one."""
        completions = self.group.completions
        if len(self.rewards) != len(completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(completions)} completions")
        for name in ("temperatures", "muted", "teacher"):
            given = getattr(self, name)
            if given and len(given) != len(completions):
                raise ValueError(f"{name} must have one entry for each completion")
        if not all(1e-30 <= temperature < inf for temperature in self.temperatures):
            raise ValueError("temperatures must be finite and above 0, as float32 has it")
        for name in ("token_advantages", "reference_logprobs"):
            _refuse_other_lengths(name, getattr(self, name), completions)
        _refuse_other_lengths("teacher", tuple(one.tokens for one in self.teacher), completions)
        _refuse_other_lengths("teacher", tuple(one.logprobs for one in self.teacher), completions)


def _refuse_other_lengths(name: str, rows: tuple[tuple[object, ...], ...], completions: tuple[Completion, ...]) -> None:
    if rows and [len(row) for row in rows] != [len(completion.tokens) for completion in completions]:
        raise ValueError(f"{name} must have one number for each token of each completion")


GroupOutcome = ScoredGroup | Discarded
