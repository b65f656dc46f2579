"""What every test stands on: an optimised BLAS before MLX, and anyio on asyncio."""

from __future__ import annotations

import pytest

from actors.compute.blas import load_blas

BLAS = load_blas()


@pytest.fixture
def anyio_backend() -> str:
    """Clotho runs on asyncio; so do its tests."""
    return "asyncio"
