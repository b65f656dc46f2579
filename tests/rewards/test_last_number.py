"""The reward reads the last number of ordinary text."""

from __future__ import annotations

import pytest

from clotho.rewards.last_number import reward
from tests.rewards.groups import problem


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("The answer is 132.", "132", 1.0),
        ("47 + 85 = 132", "132", 1.0),
        ("132 is 47 + 85", "132", 0.0),
        ("$1,320.50!", "1320.5", 1.0),
        ("10-5", "5", 1.0),
        ("It is -5", "-5", 1.0),
        ("It is -5", "5", 0.0),
        ("1320", "132", 0.0),
        ("x132", "132", 0.0),
        ("none", "132", 0.0),
        ("", "132", 0.0),
        ("9" * 5000, "9", 0.0),
    ],
)
def test_the_last_number_decides(completion: str, reference: str, value: float) -> None:
    """Commas between thousands and a sign belong to a number; a subtraction is no sign; words contain no numbers."""
    assert reward(problem(reference), completion) == value


def test_the_reward_does_not_apply_if_the_reference_is_no_number() -> None:
    """Such as the letter of an option."""
    assert reward(problem("B"), "132") is None
