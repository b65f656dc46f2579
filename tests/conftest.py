"""Fixtures of all tests. Loads the BLAS before any test imports MLX."""

from __future__ import annotations

import pytest

from clotho.cpu import load_blas

load_blas()


@pytest.fixture
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, as the program does."""
    return "asyncio"
