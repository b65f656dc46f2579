"""Every key of the replay section changes what is learned from again."""

from __future__ import annotations

from typing import Any

import pytest

from attachments.replay.replay import ReplayBuffer
from attachments.replay.tests.test_replay import ids, learned, section

BESIDE: dict[str, dict[str, Any]] = {
    "capacity": {"groups": 100}, "groups": {}, "sampling": {}, "priority": {"sampling": "priority"},
    "exponent": {"sampling": "weighted"}, "max_age": {"groups": 100},
}  # fmt: skip
OTHER: dict[str, Any] = {
    "capacity": 10, "groups": 5, "sampling": "priority", "priority": "recency", "exponent": 9.0, "max_age": 3,
}  # fmt: skip


def sampled(**settings: Any) -> list[list[int]]:
    """What some updates learn from again, of thirty groups of which the older have the larger advantages."""
    buffer = ReplayBuffer(section(**settings), seed=0)
    for index in range(30):
        buffer.add([learned(index, 1.0 + (30 - index) / 10)], version=index + 1)
    return [ids(buffer.sample(version=30, step=step)) for step in range(8)]


@pytest.mark.parametrize("key", list(OTHER))
def test_every_key_of_replay_changes_what_is_drawn(key: str) -> None:
    """No option without effect."""
    assert sampled(**BESIDE[key]) != sampled(**BESIDE[key], **{key: OTHER[key]})
