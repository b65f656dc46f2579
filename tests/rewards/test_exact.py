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
def test_exact_ignores_only_case_and_white_space(reference: str, completion: str, value: float) -> None:
    """All other characters must match, and the text must be inside `<answer>`."""
    assert reward(problem(reference), completion) == value
