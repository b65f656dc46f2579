"""Fixtures of several tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clotho.lanes.compute_thread import Compute
from tests.actors.actor_helpers import compute_thread


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Yield compute threads."""
    with compute_thread() as running:
        yield running
