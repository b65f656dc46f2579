from __future__ import annotations

import pytest

from clotho.rewards.exact import reward
from tests.rewards.groups import answered, problem


@pytest.mark.parametrize(
    ("reference", "completion", "value"),
    [
        ("New York", answered("  new\n york "), 1.0),
        ("New York", answered("New York City"), 0.0),
        ("42", answered("42.0"), 0.0),
        ("Straße", answered("STRASSE"), 1.0),
        ("", answered(""), 1.0),
        ("42", "42", 0.0),
        ("", "no answer", 0.0),
    ],
)
def test_only_case_and_white_space_are_forgiven(reference: str, completion: str, value: float) -> None:
    """Everything else must agree to the letter, and stand in an answer."""
    assert reward(problem(reference), completion) == value
