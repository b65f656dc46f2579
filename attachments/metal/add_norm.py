"""The sum of a residual and its RMS norm in one kernel, in the place of two.

    h = T(x + r),  y = T(w T(h / sqrt(mean(h^2) + eps)))

with T rounding to the type of x, as MLX's `add` and `rms_norm` do one after the other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

LANES = 32
MOST_THREADS = 1024
NUMBERS = 8
"""Numbers of a row that a thread computes, unless a row has more than `MOST_THREADS` threads can compute."""

SOURCE = """
    threadgroup float sums[32];
    const uint thread = thread_position_in_grid.x;
    const uint start = thread_position_in_grid.y * SIZE;
    float sum = 0;
    for (uint i = thread; i < SIZE; i += THREADS) {
        const T h = static_cast<T>(static_cast<float>(x[start + i]) + static_cast<float>(r[start + i]));
        total[start + i] = h;
        sum += static_cast<float>(h) * static_cast<float>(h);
    }
    sum = metal::simd_sum(sum);
    if (thread % 32 == 0) {
        sums[thread / 32] = sum;
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    sum = 0;
    for (uint i = 0; i < THREADS / 32; i++) {
        sum += sums[i];
    }
    const float factor = metal::precise::rsqrt(sum / SIZE + eps[0]);
    for (uint i = thread; i < SIZE; i += THREADS) {
        normed[start + i] = w[i] * static_cast<T>(static_cast<float>(total[start + i]) * factor);
    }
"""
"""Body of the kernel in Metal's language. A group of threads computes a row; each reads what it has written itself."""


@cache
def kernel() -> Any:
    """Return the kernel. Raises RuntimeError without Metal."""
    return mx.fast.metal_kernel(
        name="clotho_add_norm", input_names=["x", "r", "w", "eps"], output_names=["total", "normed"], source=SOURCE
    )


def threads_of(size: int) -> int:
    """Return the number of threads for a row of `size` numbers: whole groups of `LANES`."""
    return min(MOST_THREADS, -(-size // (NUMBERS * LANES)) * LANES)


def eps_of(norm: Any) -> mx.array:
    """Return the number of a norm that the kernel reads."""
    return mx.array([norm.eps], dtype=mx.float32)


def add_norm(norm: Any, eps: mx.array, x: mx.array, r: mx.array) -> list[mx.array]:
    """Return x + r and its norm, (B, 1, size) each, as x and r."""
    rows, _, size = x.shape
    threads = threads_of(size)
    found: list[mx.array] = kernel()(
        inputs=[x, r, norm.weight, eps],
        template=[("T", x.dtype), ("SIZE", size), ("THREADS", threads)],
        grid=(threads, rows, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape, x.shape],
        output_dtypes=[x.dtype, x.dtype],
    )
    return found


def in_operations(norm: Any, x: mx.array, r: mx.array) -> list[mx.array]:
    """Return what `add_norm` returns, computed by operations of MLX."""
    h = x + r
    return [h, norm(h)]


def difference(block: Any) -> float:
    """Return the largest difference of the kernel from MLX's operations, relative to the largest value.

    Raises RuntimeError if the kernel cannot be computed.
    """
    norm = block.post_attention_layernorm
    x, r = mx.random.normal((2, 5, 1, *norm.weight.shape), key=mx.random.key(0)).astype(norm.weight.dtype)
    pairs = zip(add_norm(norm, eps_of(norm), x, r), in_operations(norm, x, r), strict=True)
    return max(_relative(a.astype(mx.float32), b.astype(mx.float32)) for a, b in pairs)


def _relative(a: mx.array, b: mx.array) -> float:
    return float(mx.max(mx.abs(a - b)) / mx.max(mx.abs(b)))
