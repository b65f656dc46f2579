"""Generalized advantage estimation, against the recursion of published code in float64."""

from __future__ import annotations

import numpy as np
import pytest

from attachments.critic.critic import explained_variance, generalized_advantages, normalized


def published(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The loop of PPO's reference code (openai/baselines, ppo2/runner.py), for one episode that ends."""
    found, lastgaelam = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        nextnonterminal = 0.0 if t == len(rewards) - 1 else 1.0
        nextvalues = 0.0 if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
        lastgaelam = delta + gamma * lam * nextnonterminal * lastgaelam
        found[t] = lastgaelam
    return found


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_advantages_are_those_of_published_code(discount: float, gae_lambda: float, length: int) -> None:
    """To the last bits: the reward is that of the last token."""
    value_T = np.random.default_rng(length).normal(size=length)
    expected = published([0.0] * (length - 1) + [1.5], value_T.tolist(), discount, gae_lambda)
    found = generalized_advantages(value_T, 1.5, discount=discount, gae_lambda=gae_lambda)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_with_lambda_and_discount_of_1_an_advantage_is_the_reward_less_the_value() -> None:
    """Monte Carlo returns; values that are exact have advantages of 0."""
    value_T = np.array([0.2, 0.7, 0.4])
    found = generalized_advantages(value_T, 1.0, discount=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(found, 1.0 - value_T, atol=1e-12)
    exact = generalized_advantages(np.ones(3), 1.0, discount=1.0, gae_lambda=0.95)
    np.testing.assert_allclose(exact, 0.0, atol=1e-12)


def test_normalized_advantages_have_mean_0_and_deviation_1_over_all_tokens() -> None:
    """Also if rows differ in length; equal advantages become 0."""
    rows = normalized([np.array([1.0, 2.0]), np.array([5.0])])
    whole = np.concatenate(rows)
    assert (whole.mean(), whole.std()) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert [row.tolist() for row in normalized([np.array([2.0]), np.array([2.0, 2.0])])] == [[0.0], [0.0, 0.0]]
    assert normalized([]) == []


def test_explained_variance_is_1_for_exact_values_and_0_for_a_constant() -> None:
    """Without variance there is nothing to explain."""
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0), returns) == 0.0
    assert explained_variance(returns, np.ones(3)) is None
    assert explained_variance(np.empty(0), np.empty(0)) is None
