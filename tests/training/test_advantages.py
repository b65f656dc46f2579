"""Advantages over a batch of groups, and those of the environment."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from msgspec.structs import replace

from clotho.training.advantages import advantages, environment_advantages
from tests.learner_settings import advantage
from tests.training.policies_and_groups import scored_group

ADVANTAGES = ("group", "mean", "leave_one_out", "max_rl", "batch", "batch_centred", "batch_scaled")
BATCH = [[1.0, 0.0, 0.0, 0.0], [1.0, 3.0]]


def judged(
    kind: str, rewards: list[list[float]], *, deviation: str = "population", epsilon: float = 1e-12
) -> list[list[float]]:
    """Advantages as plain lists."""
    return [a.tolist() for a in advantages(advantage(kind, deviation=deviation, epsilon=epsilon), rewards)]


@pytest.mark.parametrize(
    ("kind", "deviation", "expected"),
    [
        ("group", "population", [np.array([3, -1, -1, -1]) / 3**0.5, [-1, 1]]),
        ("group", "sample", [[1.5, -0.5, -0.5, -0.5], [-(0.5**0.5), 0.5**0.5]]),
        ("mean", "population", [[0.75, -0.25, -0.25, -0.25], [-1, 1]]),
        ("leave_one_out", "population", [[1, -1 / 3, -1 / 3, -1 / 3], [-2, 2]]),
        ("max_rl", "population", [[3, -1, -1, -1], [-0.5, 0.5]]),
        ("batch", "population", [np.array([1, -5, -5, -5]) / 41**0.5, np.array([1, 13]) / 41**0.5]),
        ("batch", "sample", [np.array([1, -5, -5, -5]) / 49.2**0.5, np.array([1, 13]) / 49.2**0.5]),
        (
            "batch_centred",
            "population",
            [np.array([3, -1, -1, -1]) / (22 / 3) ** 0.5, [-4 / (22 / 3) ** 0.5, 4 / (22 / 3) ** 0.5]],
        ),
        ("batch_centred", "sample", [np.array([3, -1, -1, -1]) / 8.8**0.5, np.array([-4, 4]) / 8.8**0.5]),
        ("batch_scaled", "population", [np.array([9, -3, -3, -3]) / 164**0.5, np.array([-12, 12]) / 164**0.5]),
    ],
)
def test_advantages_by_hand(kind: str, deviation: str, expected: list[list[float]]) -> None:
    """Group 1 0 0 0: mean 1/4, squares 12/16: deviation sqrt(3)/4, the sample's 1/2. Group 1 3: mean 2; 1, sqrt 2.

    leave_one_out: 1 - 0, 0 - 1/3; 1 - 3, 3 - 1. max_rl: over 1/4; over 2. batch, in sixths around the mean
    5/6: 1 -5 -5 -5 and 1 13, squares 246, over 6: 41, over 5: 49.2. batch_centred, in quarters: 3 -1 -1 -1 and -4 4,
    squares 44, over 6: 22/3, over 5: 8.8. batch_scaled, in twelfths: 9 -3 -3 -3 and -12 12, over 2 sqrt(41).
    """
    for one, other in zip(judged(kind, BATCH, deviation=deviation), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_epsilon_is_added_to_the_deviation() -> None:
    """Rewards 1 0: deviation 1/2; with epsilon 1/2 the advantages are +-1/2, over group or batch."""
    for kind in ("group", "batch", "batch_centred"):
        assert judged(kind, [[1.0, 0.0]], epsilon=0.5) == [[0.5, -0.5]]


def test_the_best_and_the_worst_completion_of_a_group_are_a_pair() -> None:
    """The first of equal ones; a group of equal rewards has none."""
    assert judged("best_worst", [[0.5, 2.0, -1.0, 2.0], [3.0, 3.0]]) == [[0.0, 1.0, -1.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("kind", list(ADVANTAGES))
def test_equal_rewards_teach_nothing(kind: str) -> None:
    """No rounding of a mean may turn equal rewards into a signal, nor a group of one."""
    for deviation, size, reward in product(("population", "sample"), (1, 2, 3, 7), (0.0, 0.1, -3.7, 1e9)):
        found = judged(kind, [[reward] * size], deviation=deviation, epsilon=1e-8)
        assert found == [[0.0] * size], (deviation, size, reward)


@pytest.mark.parametrize("kind", [kind for kind in ADVANTAGES if kind != "batch"])
def test_equal_rewards_teach_nothing_beside_other_groups(kind: str) -> None:
    """Whatever the rest of the batch does; over the batch without groups they do: lower than others is bad."""
    assert judged(kind, [[0.1] * 3, [1.0, 5.0]])[0] == [0.0] * 3
    assert max(judged("batch", [[0.1] * 3, [1.0, 5.0]])[0]) < 0


@pytest.mark.parametrize("kind", list(ADVANTAGES))
def test_shuffling_groups_and_members_permutes_advantages(kind: str) -> None:
    """A completion's advantage depends on the sets of rewards, not on its place."""
    rng = np.random.default_rng(0)
    rewards = [rng.normal(size=size).tolist() for size in (4, 9, 2)]
    order_G = rng.permutation(9)
    first = judged(kind, rewards)
    second = judged(kind, [rewards[2], [rewards[1][i] for i in order_G], rewards[0]])
    np.testing.assert_allclose(second[0], first[2], rtol=1e-9)
    np.testing.assert_allclose(second[1], [first[1][i] for i in order_G], rtol=1e-9)
    np.testing.assert_allclose(second[2], first[0], rtol=1e-9)


@pytest.mark.parametrize("rewards_G", [[], [1.0, math.nan], [1.0, math.inf]])
@pytest.mark.parametrize("kind", list(ADVANTAGES))
def test_rewards_that_are_no_numbers_are_refused(kind: str, rewards_G: list[float]) -> None:
    """A NaN must not reach the gradient through the back door; nor one group's into the others'."""
    with pytest.raises(ValueError, match="finite"):
        judged(kind, [[1.0, 0.0], rewards_G])


def test_no_groups_have_no_advantages() -> None:
    """A batch that lost all its groups is no error here."""
    assert [judged(kind, []) for kind in ADVANTAGES] == [[]] * len(ADVANTAGES)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]), ([1.0, 0.0], [1.0, -1.0]), ([0.5, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([0.75, 0.25], [0.5, -0.5]), ([1.2, 0.2], [5 / 7, -5 / 7]),
        ([-1.0, 1.0, 1.0, 1.0], [-1.0, 1 / 3, 1 / 3, 1 / 3]), ([-1.0, -1.0, -1.0, 1.0], [-1.0, -1.0, -1.0, 3.0]),
        ([-3.0, -1.0], [-1.0, 1.0]), ([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]),
    ],
)  # fmt: skip
def test_max_rl_divides_by_the_mean_of_rewards_above_zero_or_above_the_lowest(
    rewards: list[float], expected: list[float]
) -> None:
    """A group that fails as a whole teaches nothing. Rewards of -1 and 1 give the advantages of 0 and 1; a mean of
    zero or less neither removes a group nor turns its signs.
    """
    np.testing.assert_allclose(judged("max_rl", [rewards])[0], expected, rtol=1e-12)


def test_the_environment_gives_advantages_token_by_token() -> None:
    """As they are, per group and completion."""
    group = replace(scored_group([[1, 2], [3]], [0.0, 1.0]), token_advantages=((0.5, -1.0), (2.0,)))
    assert [row_T.tolist() for row_T in environment_advantages(group)] == [[0.5, -1.0], [2.0]]


@pytest.mark.parametrize(("given", "says"), [((), "has no"), (((math.nan,),), "not finite")])
def test_groups_without_advantages_of_their_own_are_refused_by_name(
    given: tuple[tuple[float, ...], ...], says: str
) -> None:
    """The message names the group."""
    group = replace(scored_group([[3]], [0.0], group_id=17), token_advantages=given)
    with pytest.raises(ValueError, match=f"group 17 .*{says}"):
        environment_advantages(group)
