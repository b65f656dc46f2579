"""Loss aggregation: the weight of each token in the loss of an update."""

from __future__ import annotations

import pytest

from clotho.training.objectives.loss import AGGREGATIONS, loss_weights

LENGTHS = [[3, 1, 0], [4], [0, 0]]
"""Eight trained tokens in three completions of two groups. The third group has none."""


def flat(kind: str, lengths: list[list[int]], max_tokens: int = 10) -> list[float]:
    """Return the weights of all completions in one row."""
    return [float(value) for share_G in loss_weights(kind, lengths, max_tokens=max_tokens) for value in share_G]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0, 0]),
        ("sequence_mean", [1 / 9, 1 / 3, 0, 1 / 12, 0, 0]),
        ("token_sum", [1 / 30, 1 / 30, 0, 1 / 30, 0, 0]),
        ("group_mean", [1 / 8, 1 / 8, 0, 1 / 8, 0, 0]),
    ],
)
def test_weights_by_hand(kind: str, expected: list[float]) -> None:
    """T = 8, S = 3, max_tokens = 10, T_g = 4 and 4, P = 2.

    Completions without trained tokens are in no denominator. token_mean 1/T; sequence_mean 1/(T_i S); token_sum 1/(10
    S); group_mean 1/(T_g P).
    """
    assert flat(kind, LENGTHS) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", list(AGGREGATIONS))
def test_without_trained_tokens_all_weights_are_zero(kind: str) -> None:
    """No division by zero, also without any group."""
    assert flat(kind, [[0, 0], [0]]) == [0.0, 0.0, 0.0]
    assert flat(kind, []) == []
