"""Groups on their way from the generator to the learner: completions, rewards, or the reason for a discard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Literal, Protocol

from msgspec import Struct

from protocols.prompt import Prompt
from protocols.sampling import Completion

ZERO_VARIANCE_THRESHOLD = 1e-6
"""A group is a zero-variance group if its rewards differ by at most this value. Such a group has no advantages."""

MAX_GROUP_REWARD = 1e9
"""Largest absolute reward of a group. Squares of larger values overflow float32 statistics."""


def bounded(rewards: Iterable[float]) -> bool:
    """Return whether all rewards are finite and at most `MAX_GROUP_REWARD` in absolute size."""
    return all(abs(reward) <= MAX_GROUP_REWARD for reward in rewards)


def are_equal(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ by at most `ZERO_VARIANCE_THRESHOLD`."""
    return max(rewards) - min(rewards) <= ZERO_VARIANCE_THRESHOLD


class RolloutGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Generator -> scorer. All completions of one prompt; at least one."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of the group."""
        return min(version for completion in self.completions for version in completion.versions)


DiscardReason = Literal[
    "zero_variance",
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
    """Any actor -> learner, on the queue that the group would have taken. The group is counted and never trained on.

    Reasons:
      zero_variance: all rewards are equal, all completions are masked, or the gradient is exactly zero.
      stale: older than `learner.max_staleness`, or sampled before a rollback.
      reward_error: a reward function raised, exceeded a limit, ended its process or returned no valid number, or the
        environment did so in every episode.
      generation_error: the engine could not finish the group.
      invalid: the group failed validation.
      not_finite: the update of the group was not finite and was skipped.
      duplicate: an environment has sent the group before.
      surplus: the group arrived after the last batch of the run.
      lost: an environment sent the group before a restart, and it had not been trained on; or a custom actor received
        the group and did not send it on.

    rewards, parts, correct: as in `ScoredGroup`, if the group was scored.
    failed_rewards: names of the reward functions that failed, with the reason `reward_error`.
    """

    prompt: Prompt
    reason: DiscardReason
    detail: str
    completions: tuple[Completion, ...] = ()
    rewards: tuple[float, ...] = ()
    parts: dict[str, tuple[float | None, ...]] = {}
    correct: tuple[bool | None, ...] = ()
    failed_rewards: tuple[str, ...] = ()


class TeacherTokens(Struct, frozen=True, kw_only=True):
    """Top-K tokens of a teacher model at each token of one completion. K is the same everywhere.

    tokens, logprobs: shape (T, K); natural log under the teacher. Rows of tokens that the policy did not sample are
    ignored.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class ScoredGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Scorer or atropos_fetcher -> learner. `rewards[i]` is the weighted sum of rewards of completion i; finite.

    parts: value of each reward function per completion; None where it does not apply. correct: whether every reward
    with `correct = true` accepts a completion; None where none applies. Empty from environments.

    Only environments and teachers set the following fields. Each is empty, or has one entry per completion:
    token_advantages: advantage per token; used in place of advantages from rewards.
    reference_logprobs: log-probability per token under the environment's reference policy.
    temperatures: sampling temperature, above 0. Empty: `sampling.temperature`.
    zero_advantage: the completion's advantage is 0; its reward still counts in the group's statistics.
    teacher: the teacher's alternatives, for distillation; without tokens for a completion that has no teacher.
    teacher_logprobs: log-probability per token under a teacher. It is added to the advantage, less that of the policy.
    Empty for a completion that has no teacher.
    teacher_weights: weight per token in the loss, relative to the mean of the batch; above 0. Empty for a completion
    that has no teacher.
    logprob_error: largest difference in nats between the log-probabilities in the message and those of the sample log;
    None if the sample log contains none.
    """

    group: RolloutGroup
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float | None, ...]]
    correct: tuple[bool | None, ...] = ()
    token_advantages: tuple[tuple[float, ...], ...] = ()
    reference_logprobs: tuple[tuple[float, ...], ...] = ()
    temperatures: tuple[float, ...] = ()
    zero_advantage: tuple[bool, ...] = ()
    teacher: tuple[TeacherTokens, ...] = ()
    teacher_logprobs: tuple[tuple[float, ...], ...] = ()
    teacher_weights: tuple[tuple[float, ...], ...] = ()
    logprob_error: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if a field does not match the completions one to one."""
        completions = self.group.completions
        if len(self.rewards) != len(completions):
            raise ValueError(f"{len(self.rewards)} rewards for {len(completions)} completions")
        for name, entries in (
            ("correct", self.correct),
            ("temperatures", self.temperatures),
            ("zero_advantage", self.zero_advantage),
            ("teacher", self.teacher),
        ):
            if entries and len(entries) != len(completions):
                raise ValueError(f"{name} must have one entry per completion")
        if not all(1e-30 <= temperature < inf for temperature in self.temperatures):
            raise ValueError("temperatures must be finite, and above 0 in float32")
        _require_token_lengths("token_advantages", self.token_advantages, completions)
        _require_token_lengths("reference_logprobs", self.reference_logprobs, completions)
        _require_token_lengths("teacher_logprobs", self.teacher_logprobs, completions, or_none=True)
        _require_token_lengths("teacher_weights", self.teacher_weights, completions, or_none=True)
        _require_token_lengths("teacher", tuple(one.tokens for one in self.teacher), completions, or_none=True)
        _require_token_lengths("teacher", tuple(one.logprobs for one in self.teacher), completions, or_none=True)

    @property
    def prompt(self) -> Prompt:
        """The prompt of the group."""
        return self.group.prompt

    @property
    def completions(self) -> tuple[Completion, ...]:
        """The completions of the group."""
        return self.group.completions

    def discarded(self, reason: DiscardReason, detail: str) -> Discarded:
        """Return the group as discarded, with its completions and rewards."""
        return Discarded(
            prompt=self.prompt,
            reason=reason,
            detail=detail,
            completions=self.completions,
            rewards=self.rewards,
            parts=self.parts,
            correct=self.correct,
        )

    def unless_equal(self) -> ScoredGroup | Discarded:
        """Return the group, discarded as a zero-variance group if it is one."""
        if not are_equal(self.rewards):
            return self
        return self.discarded("zero_variance", f"all {len(self.rewards)} rewards are {self.rewards[0]:g}")


def _require_token_lengths(
    name: str, rows: tuple[tuple[object, ...], ...], completions: tuple[Completion, ...], *, or_none: bool = False
) -> None:
    """Raise ValueError unless there are no rows, or one per completion with its length, or with none if `or_none`."""
    lengths = [len(row) for row in rows]
    expected = [0 if or_none and not n else len(c.tokens) for n, c in zip(lengths, completions, strict=False)]
    if rows and (len(rows) != len(completions) or lengths != expected):
        raise ValueError(f"{name} must have one entry per token of each completion")


GroupOutcome = ScoredGroup | Discarded
"""What the learner receives for each group."""


class GroupRewards(Protocol):
    """Computes the rewards of a group; implemented by `training_run.rewards.runner.RewardRunner`."""

    async def score(self, group: RolloutGroup) -> GroupOutcome:
        """Score every completion. An exception ends the run."""
