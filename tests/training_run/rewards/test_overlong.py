"""Length penalty `overlong`."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocols.errors import ProfileError
from protocols.rollout import Discarded, GroupOutcome, RolloutGroup, ScoredGroup
from protocols.sampling import Completion, FinishReason
from tests.rewards.groups import group
from training_run.profile.data import RewardSection
from training_run.rewards.overlong import Overlong
from training_run.rewards.runner import RewardRunner

LENGTH = RewardSection(name="tests.rewards.sample_rewards:length", run_in="thread")
"""The number of characters."""


def completion(length: int, finish_reason: FinishReason = "stop") -> Completion:
    """Return a completion of `length` tokens."""
    return Completion(
        tokens=(1,) * length, logprobs=(-0.5,) * length, versions=(0,) * length, text="", finish_reason=finish_reason
    )


def group_of_lengths(*lengths: int, texts: tuple[str, ...] = ()) -> RolloutGroup:
    """Return a group whose completions have these token counts and finish reason `stop`."""
    made = group(*(texts or ("a",) * len(lengths)))
    return replace(
        made,
        completions=tuple(
            replace(completion, tokens=(1,) * n, logprobs=(-0.5,) * n, versions=(0,) * n)
            for completion, n in zip(made.completions, lengths, strict=True)
        ),
    )


async def scored(rollouts: RolloutGroup, section: RewardSection, overlong: Overlong | None) -> GroupOutcome:
    """Score a group with one reward function and the penalty."""
    runner = RewardRunner((section,), overlong=overlong)
    try:
        return await runner.score(rollouts)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (25, -1.0)]
)
def test_the_penalty_is_linear_over_the_buffer(length: int, penalty: float) -> None:
    """For L = 20 and c = 8: 0 up to 12 tokens, then 1/8 per token, at most 1."""
    assert Overlong(max_tokens=20, buffer=8)(completion(length)) == penalty
    assert Overlong(max_tokens=20, buffer=8, penalty=0.4)(completion(length)) == pytest.approx(0.4 * penalty)


@pytest.mark.parametrize("length", [1, 12, 15, 20])
def test_a_truncated_completion_has_the_full_penalty(length: int) -> None:
    """Even below `max_tokens`, if the context length truncated the completion."""
    assert Overlong(max_tokens=20, buffer=8, penalty=3.0)(completion(length, "length")) == -3.0


def test_the_buffer_may_equal_max_tokens() -> None:
    """Every token then has a penalty."""
    assert Overlong(max_tokens=4, buffer=4)(completion(1)) == -0.25


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_out_of_range_is_refused(buffer: int) -> None:
    """The message names the key and the range."""
    with pytest.raises(ProfileError, match=f"learner.objective.overlong_penalty.buffer = {buffer} is out of range"):
        Overlong(max_tokens=20, buffer=buffer)


async def test_the_penalty_is_a_separate_component() -> None:
    """For L = 8, c = 4 and penalty 2, completions of 4, 7 and 8 tokens have penalties 0, -1.5 and -2.

    The penalty gives a zero-variance group a nonzero variance. The weight of the reward does not scale the penalty.
    """
    section = replace(LENGTH, weight=3.0)
    long = group_of_lengths(4, 7, 8)
    outcome = await scored(long, section, Overlong(max_tokens=8, buffer=4, penalty=2.0))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.parts == {LENGTH.name: (1.0, 1.0, 1.0), "overlong": (0.0, -1.5, -2.0)}
    assert outcome.rewards == (3.0, 1.5, 1.0)
    assert isinstance(await scored(long, section, None), Discarded)


async def test_the_penalty_may_make_rewards_equal() -> None:
    """The penalty is added before the variance is checked."""
    outcome = await scored(group_of_lengths(8, 4, texts=("ab", "a")), LENGTH, Overlong(max_tokens=8, buffer=4))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "zero_variance"
    assert outcome.rewards == (1.0, 1.0)


async def test_the_penalty_alone_is_not_a_reward() -> None:
    """A completion to which no reward function applies still discards its group."""
    section = RewardSection(name="tests.rewards.sample_rewards:none", run_in="thread")
    outcome = await scored(group_of_lengths(4, 8), section, Overlong(max_tokens=8, buffer=4))
    assert isinstance(outcome, Discarded)
    assert "no reward applies" in outcome.detail


def test_a_reward_named_overlong_is_refused() -> None:
    """With the penalty, the name is reserved; without the penalty, the name is unknown."""
    section = RewardSection(name="overlong")
    with pytest.raises(ProfileError, match="'overlong' is also the name of the penalty"):
        RewardRunner((section,), overlong=Overlong(max_tokens=8, buffer=4))
    with pytest.raises(ProfileError, match="'overlong' is unknown"):
        RewardRunner((section,))
