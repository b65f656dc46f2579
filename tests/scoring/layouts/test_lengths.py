"""Rounded lengths."""

from __future__ import annotations

from clotho.scoring.layouts.rows import bucket


def test_lengths_are_bucketed_with_little_waste() -> None:
    """At most 16 lengths per octave, at least the requested length, and less than 1/8 longer beyond 64 tokens."""
    assert [bucket(n) for n in (1, 8, 9, 64, 65, 129)] == [8, 8, 16, 64, 72, 144]
    assert len({bucket(n) for n in range(1025, 2049)}) <= 16
    assert all(n <= bucket(n) < n + max(8, n / 8) for n in range(1, 4096))
