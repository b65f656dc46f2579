"""What every test stands on: anyio runs on asyncio."""

from __future__ import annotations

import pytest

import actors  # an optimised BLAS, before any test imports MLX

assert actors.BLAS


@pytest.fixture
def anyio_backend() -> str:
    """Clotho runs on asyncio; so do its tests."""
    return "asyncio"
