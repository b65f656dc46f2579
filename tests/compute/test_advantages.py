"""Group-relative advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actors.compute.advantages import group_relative


def test_advantages_are_centred_and_scaled_by_the_groups_own_spread() -> None:
    """Rewards 1 0 0 0: mean 1/4, population deviation sqrt(3)/4, so A = (3, -1, -1, -1) / sqrt(3)."""
    expected_G = np.array([3.0, -1.0, -1.0, -1.0]) / math.sqrt(3.0)
    np.testing.assert_allclose(group_relative([1.0, 0.0, 0.0, 0.0], epsilon=1e-12), expected_G, rtol=1e-9)


def test_epsilon_is_added_to_the_deviation() -> None:
    """Rewards 1 0: deviation 1/2; with epsilon 1/2 the advantages are +-1/2."""
    assert group_relative([1.0, 0.0], epsilon=0.5).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("reward", [0.0, 0.1, -3.7, 1e9])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_teach_nothing(reward: float, size: int) -> None:
    """No rounding of the mean may turn equal rewards into a signal."""
    assert group_relative([reward] * size, epsilon=1e-8).tolist() == [0.0] * size


def test_nearly_equal_rewards_stay_bounded() -> None:
    """A spread of 1e-9 over epsilon 1e-4 gives advantages of 1e-5, not of 1."""
    assert np.abs(group_relative([1.0, 1.0 + 1e-9], epsilon=1e-4)).max() < 1e-5


def test_shuffling_group_members_permutes_advantages() -> None:
    """A completion's advantage depends on the set of rewards, not on its place."""
    rewards_G = np.random.default_rng(0).normal(size=9)
    order_G = np.random.default_rng(1).permutation(9)
    shuffled_G = group_relative(rewards_G[order_G].tolist(), epsilon=1e-4)
    np.testing.assert_allclose(shuffled_G, group_relative(rewards_G.tolist(), epsilon=1e-4)[order_G], rtol=1e-12)


@pytest.mark.parametrize("rewards_G", [[], [1.0, math.nan], [1.0, math.inf]])
def test_rewards_that_are_no_numbers_are_refused(rewards_G: list[float]) -> None:
    """A NaN must not reach the gradient through the back door."""
    with pytest.raises(ValueError, match="finite"):
        group_relative(rewards_G, epsilon=1e-4)
