"""What every test stands on: anyio runs on asyncio."""

from __future__ import annotations

import pytest

import clotho  # an optimised BLAS, before any test imports MLX

assert clotho.BLAS


@pytest.fixture
def anyio_backend() -> str:
    """Clotho runs on asyncio; so do its tests."""
    return "asyncio"
