"""Which problem a group asks."""

from __future__ import annotations

import pytest

from clotho.storage.datasets import ProblemOrder


def test_every_epoch_asks_every_problem_once_in_an_order_of_its_own() -> None:
    """A permutation per epoch, from seed and epoch alone."""
    order = ProblemOrder(50, seed=1, shuffle=True)
    first, second = ([order.index(epoch * 50 + i) for i in range(50)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert [ProblemOrder(50, seed=2, shuffle=True).index(i) for i in range(50)] != first


def test_the_order_is_a_pure_function() -> None:
    """Asked backwards, or by a resumed run, a group asks the same problem."""
    order, fresh = ProblemOrder(7, seed=1, shuffle=True), ProblemOrder(7, seed=1, shuffle=True)
    forwards = [order.index(group_id) for group_id in range(70)]
    assert [fresh.index(group_id) for group_id in reversed(range(70))] == forwards[::-1]


def test_without_shuffling_the_file_is_followed() -> None:
    """Again and again."""
    order = ProblemOrder(3, seed=1, shuffle=False)
    assert [order.index(group_id) for group_id in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="at least one"):
        ProblemOrder(0, seed=1, shuffle=True)
