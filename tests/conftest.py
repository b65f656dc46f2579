"""Fixtures of all tests. Loads the BLAS before any test imports MLX."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from clotho.cpu import load_blas

load_blas()

settings.register_profile(
    "repeatable", deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("repeatable")


@pytest.fixture
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, as the program does."""
    return "asyncio"
