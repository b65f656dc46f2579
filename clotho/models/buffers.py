"""How much memory MLX holds, and may keep."""

from __future__ import annotations

import mlx.core as mx


def limit_buffer_cache(limit_bytes: int) -> None:
    """Bound the freed buffers that MLX keeps for reuse; variable lengths make them grow otherwise."""
    mx.set_cache_limit(limit_bytes)


def peak_memory() -> int:
    """Most bytes of arrays held at once since the process began."""
    return mx.get_peak_memory()
