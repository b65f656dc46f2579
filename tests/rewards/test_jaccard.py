from __future__ import annotations

import pytest

from clotho.rewards.jaccard import reward
from tests.rewards.groups import answered, problem


@pytest.mark.parametrize(
    ("reference", "answer", "value"),
    [
        ("the cat sat", "The cat, sat!", 1.0),
        ("the cat sat", "the dog sat", 0.5),
        ("the cat sat", "cat cat cat", 1 / 3),
        ("the cat", "a dog", 0.0),
        ("3.5", "3 5", 0.0),
        ("-5", "5", 0.0),
        ("-5", "(-5)", 1.0),
        ("don't", "don\u2019t", 0.0),
        ("", "", 1.0),
        ("?!", "", 1.0),
        ("", "word", 0.0),
        ("word", "", 0.0),
    ],
)
def test_the_reward_is_intersection_over_union(reference: str, answer: str, value: float) -> None:
    """Words are distinct, in lower case and without surrounding punctuation."""
    assert reward(problem(reference), answered(answer)) == pytest.approx(value)


def test_a_completion_without_an_answer_has_reward_zero() -> None:
    """Even if the reference is empty."""
    assert reward(problem(""), "") == 0.0
