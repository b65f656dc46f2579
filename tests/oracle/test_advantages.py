"""Every advantage against loops."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from clotho.training.advantages import advantages
from tests.learner_settings import advantage
from tests.oracle.advantages import advantages as slow


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
