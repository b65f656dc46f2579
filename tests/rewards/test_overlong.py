"""Soft overlong punishment."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from clotho.config.schema import RewardSection
from clotho.rewards.overlong import Overlong
from clotho.rewards.runner import RewardRunner
from protocols.errors import ProfileError
from protocols.rollout import Discarded, RolloutGroup
from protocols.sampling import Completion, FinishReason
from protocols.score import GroupOutcome, ScoredGroup
from tests.rewards.groups import group

LENGTH = RewardSection(name="tests.rewards.sample_rewards:length")
"""Counts characters."""


def completion(length: int, finish_reason: FinishReason = "stop") -> Completion:
    """Make a completion of so many tokens."""
    return Completion(
        tokens=(1,) * length, logprobs=(-0.5,) * length, versions=(0,) * length, text="", finish_reason=finish_reason
    )


def of_lengths(*lengths: int, texts: tuple[str, ...] = ()) -> RolloutGroup:
    """Make a group whose completions have so many tokens and ended by themselves; text does not depend on that."""
    made = group(*(texts or ("a",) * len(lengths)))
    return replace(
        made,
        completions=tuple(
            replace(completion, tokens=(1,) * n, logprobs=(-0.5,) * n, versions=(0,) * n)
            for completion, n in zip(made.completions, lengths, strict=True)
        ),
    )


async def scored(of: RolloutGroup, section: RewardSection, overlong: Overlong | None) -> GroupOutcome:
    """Score a group with one reward and the penalty."""
    runner = RewardRunner((section,), overlong=overlong)
    try:
        return await runner.score(of)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (19, -0.875), (20, -1.0), (25, -1.0)]
)
def test_the_penalty_rises_in_a_straight_line_over_the_buffer(length: int, penalty: float) -> None:
    """L = 20, c = 8: nothing up to 12 tokens, an eighth for each more, and no more than 1."""
    assert Overlong(max_tokens=20, buffer=8)(completion(length)) == penalty
    assert Overlong(max_tokens=20, buffer=8, penalty=0.4)(completion(length)) == pytest.approx(0.4 * penalty)


@pytest.mark.parametrize("length", [1, 12, 15, 20])
def test_what_was_cut_off_has_all_of_it(length: int) -> None:
    """Also below `max_tokens`, where the model's context ended first."""
    assert Overlong(max_tokens=20, buffer=8, penalty=3.0)(completion(length, "length")) == -3.0


def test_the_buffer_may_be_all_there_is() -> None:
    """Then every token costs."""
    assert Overlong(max_tokens=4, buffer=4)(completion(1)) == -0.25


@pytest.mark.parametrize("buffer", [0, 21])
def test_a_buffer_that_does_not_fit_is_refused(buffer: int) -> None:
    """It could only be meant otherwise."""
    with pytest.raises(ProfileError, match=rf"learner.overlong_buffer = {buffer}: .* 1 to sampling.max_tokens = 20"):
        Overlong(max_tokens=20, buffer=buffer)


async def test_length_is_punished_as_a_part_of_its_own() -> None:
    """Completions of 4, 7 and 8 tokens of at most 8, a buffer of 4, a penalty of 2: 0, -1.5 and -2 on equal rewards.

    So the group has a signal that it had not; a weight of the reward is no weight of the penalty.
    """
    section = replace(LENGTH, weight=3.0)
    long = of_lengths(4, 7, 8)
    outcome = await scored(long, section, Overlong(max_tokens=8, buffer=4, penalty=2.0))
    assert isinstance(outcome, ScoredGroup)
    assert outcome.parts == {LENGTH.name: (1.0, 1.0, 1.0), "overlong": (0.0, -1.5, -2.0)}
    assert outcome.rewards == (3.0, 1.5, 1.0)
    assert isinstance(await scored(long, section, None), Discarded)


async def test_length_may_take_a_signal_away() -> None:
    """It is added before the rewards are compared: 2 characters in 8 tokens against 1 in 4."""
    outcome = await scored(of_lengths(8, 4, texts=("ab", "a")), LENGTH, Overlong(max_tokens=8, buffer=4))
    assert isinstance(outcome, Discarded)
    assert outcome.reason == "no_signal"
    assert outcome.rewards == (1.0, 1.0)


async def test_length_is_no_reward() -> None:
    """Where no reward applies to a completion, the penalty does not stand for one."""
    section = RewardSection(name="tests.rewards.sample_rewards:none")
    outcome = await scored(of_lengths(4, 8), section, Overlong(max_tokens=8, buffer=4))
    assert isinstance(outcome, Discarded)
    assert "no reward applies" in outcome.detail


def test_a_reward_must_not_take_the_name_of_the_penalty() -> None:
    """Where that is added; where it is not, the name is as unknown as any."""
    section = RewardSection(name="overlong")
    with pytest.raises(ProfileError, match=r"'overlong' is the name of the penalty that learner\.overlong_buffer adds"):
        RewardRunner((section,), overlong=Overlong(max_tokens=8, buffer=4))
    with pytest.raises(ProfileError, match="'overlong' is unknown"):
        RewardRunner((section,))
