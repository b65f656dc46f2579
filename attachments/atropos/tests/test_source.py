"""The backoff between two polls."""

from __future__ import annotations

import pytest

from training_run.supervision.supervisor import Backoff


def test_delays_grow_to_the_maximum_and_start_again_after_a_reset() -> None:
    """Delays are multiplied by 1.5."""
    backoff = Backoff(max_seconds=0.2)
    delays = [backoff.next_seconds() for _ in range(6)]
    assert delays == pytest.approx([0.05, 0.075, 0.1125, 0.16875, 0.2, 0.2])
    backoff.reset()
    assert backoff.next_seconds() == 0.05


def test_no_delay_exceeds_the_maximum() -> None:
    """Including the first delay."""
    assert Backoff(max_seconds=0.01).next_seconds() == 0.01
