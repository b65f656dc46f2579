"""Pauses between two looks."""

from __future__ import annotations

import pytest

from clotho.atropos.source import Pauses


def test_pauses_grow_to_the_longest_and_begin_anew() -> None:
    """Short ones while something may come soon, long ones when nothing does."""
    pauses = Pauses(longest=0.2)
    taken = [pauses.next() for _ in range(6)]
    assert taken == pytest.approx([0.05, 0.075, 0.1125, 0.16875, 0.2, 0.2])
    pauses.reset()
    assert pauses.next() == 0.05


def test_no_pause_is_longer_than_the_longest() -> None:
    """Not the first one either."""
    assert Pauses(longest=0.01).next() == 0.01
