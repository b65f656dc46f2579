"""Every advantage against loops."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from clotho.training.advantages import advantages
from tests.learner_settings import advantage
from tests.oracle.advantages import advantages as slow
from tests.oracle.advantages import least_variance


@pytest.mark.parametrize("spread", ["population", "sample"])
@pytest.mark.parametrize("kind", ["group", "mean", "leave_one_out", "max_rl", "batch", "batch_centred", "batch_scaled"])
def test_advantages_equal_the_loops(kind: str, spread: Literal["population", "sample"]) -> None:
    """To float64's rounding, for groups of one to six."""
    rng = np.random.default_rng(3)
    rewards = [rng.normal(size=size).tolist() for size in (4, 1, 6, 2)]
    found = advantages(advantage(kind, deviation=spread, epsilon=1e-3), rewards)
    expected = slow(kind, rewards, spread=spread, epsilon=1e-3)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spread", ["population", "sample"])
def test_the_baseline_of_least_variance_equals_the_loops(spread: Literal["population", "sample"]) -> None:
    """For weights of all sizes."""
    rng = np.random.default_rng(4)
    rewards = [rng.normal(size=size) for size in (4, 6, 2)]
    logs = [3.0 * rng.normal(size=one.size) for one in rewards]
    found = advantages(advantage("optimal_baseline", deviation=spread, epsilon=1e-3), rewards, logs)
    for one, reward_G, log_G in zip(found, rewards, logs, strict=True):
        expected = least_variance(reward_G.tolist(), np.exp(log_G).tolist(), spread=spread, epsilon=1e-3)
        np.testing.assert_allclose(one, expected, rtol=1e-10, atol=1e-12)
