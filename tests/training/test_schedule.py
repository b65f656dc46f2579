"""Learning-rate schedules."""

from __future__ import annotations

from itertools import product

import pytest

from clotho.training.optimizers import learning_rate
from tests.learner_settings import learner_settings


def rates(steps: int, **keys: object) -> list[float]:
    """Learning rates of all steps, with a full rate of 8."""
    settings = learner_settings(**{"learning_rate": 8.0, "warmup_steps": 0, **keys})
    return [learning_rate(step, steps=steps, settings=settings) for step in range(steps)]


def test_the_warmup_is_linear_and_starts_above_zero() -> None:
    """Four steps of warmup: 1/4, 2/4, 3/4, 4/4 of the rate."""
    assert rates(6, schedule="constant", warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_the_linear_schedule_would_reach_the_minimum_after_the_last_step() -> None:
    """From 8 in four equal steps, the fifth of which would be 0."""
    assert rates(4, schedule="linear") == [8.0, 6.0, 4.0, 2.0]


def test_the_cosine_schedule_would_reach_the_minimum_after_the_last_step() -> None:
    """Half a cosine from 8 to 2: half way, half the fall; a third of the way, a quarter of it."""
    assert rates(2, schedule="cosine", min_learning_rate=2.0) == pytest.approx([8.0, 5.0])
    assert rates(3, schedule="cosine", min_learning_rate=2.0)[1] == pytest.approx(2.0 + 6.0 * 0.75)


def test_the_decay_starts_after_the_warmup() -> None:
    """Two steps of warmup, then the full rate, then the decay."""
    assert rates(6, schedule="linear", warmup_steps=2) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_update_has_a_positive_rate_without_a_minimum(schedule: str) -> None:
    """An update at rate 0 would be published without a change. A warmup may be longer than the run."""
    for warmup_steps, steps in product((0, 1, 3, 9), (1, 2, 3, 10)):
        found = rates(steps, schedule=schedule, warmup_steps=warmup_steps)
        assert all(0.0 < rate <= 8.0 for rate in found), (warmup_steps, steps)


def test_the_minimum_stays_beyond_the_last_step() -> None:
    """A run may be resumed with fewer steps than it has taken."""
    settings = learner_settings(learning_rate=8.0, schedule="cosine", min_learning_rate=1.0)
    assert learning_rate(99, steps=10, settings=settings) == 1.0
