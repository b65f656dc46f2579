"""The learning rate, step by step."""

from __future__ import annotations

import pytest
from msgspec import convert

from clotho.config.schema import LearnerSection
from clotho.training.schedule import SCHEDULES, learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    """Rates of all steps, from a full rate of 8."""
    settings = convert({"learning_rate": 8.0, **keys}, LearnerSection)
    return [learning_rate(step, steps=steps, settings=settings) for step in range(steps)]


def test_warm_up_is_linear_and_never_zero() -> None:
    """Four steps of warm-up: 1/4, 2/4, 3/4, 4/4 of the rate."""
    assert rates(6, schedule="constant", warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]


def test_linear_falls_to_the_minimum_at_the_last_step() -> None:
    """From 8 to 0 in five steps."""
    assert rates(5, schedule="linear") == [8.0, 6.0, 4.0, 2.0, 0.0]


def test_cosine_falls_to_the_minimum_at_the_last_step() -> None:
    """Half a cosine from 8 to 2: half way, half the fall; a third of the way, a quarter of it."""
    assert rates(3, schedule="cosine", min_learning_rate=2.0) == pytest.approx([8.0, 5.0, 2.0])
    assert rates(4, schedule="cosine", min_learning_rate=2.0)[1] == pytest.approx(2.0 + 6.0 * 0.75)


def test_the_decay_starts_after_the_warm_up() -> None:
    """Two steps of warm-up, then the full rate, then down."""
    assert rates(5, schedule="linear", warmup_steps=2) == [4.0, 8.0, 8.0, 4.0, 0.0]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 9])
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_the_rate_stays_between_its_bounds(schedule: str, warmup_steps: int, steps: int) -> None:
    """Also for runs of one step, for a warm-up longer than the run, and beyond the end."""
    settings = convert(
        {"min_learning_rate": 0.5, "learning_rate": 8.0, "schedule": schedule, "warmup_steps": warmup_steps},
        LearnerSection,
    )
    values = [learning_rate(step, steps=steps, settings=settings) for step in range(steps + 5)]
    assert all(0.5 <= value <= 8.0 for value in values)
    assert values[0] > 0.5


def test_a_resumed_run_may_go_beyond_the_schedule() -> None:
    """Past the last step the minimum stays."""
    settings = LearnerSection(learning_rate=8.0, min_learning_rate=1.0)
    assert learning_rate(99, steps=10, settings=settings) == 1.0
