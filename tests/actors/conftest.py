"""Fixtures of several tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from clotho.runtime.compute_thread import ComputeExecutor
from tests.actors.actor_helpers import compute_thread


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """Yield a compute thread."""
    with compute_thread() as running:
        yield running
