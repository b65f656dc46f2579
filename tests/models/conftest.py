"""Fixtures of the tests of models."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def no_buffer_cache() -> Iterator[None]:
    """Let MLX free every buffer at once: a buffer that is used again counts with its own size, which can be larger."""
    limit = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(limit)
