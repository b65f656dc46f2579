"""Fixtures of all tests, and profiles of property tests. Loads the BLAS before any test imports MLX.

Property tests of the fast set repeat the same 200 examples in every run. Those of the slow set draw 20,000 new examples
in every run; a failure prints the example and a `@reproduce_failure` line.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from clotho.cpu import load_blas

load_blas()

settings.register_profile(
    "repeatable",
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("repeatable")
settings.register_profile(
    "many", settings.get_profile("repeatable"), max_examples=20_000, derandomize=False, print_blob=True
)


@pytest.fixture
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, as the program does."""
    return "asyncio"
