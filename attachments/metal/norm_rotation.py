"""RMS norm and rotation of the queries and keys of a decode step in one kernel, in the place of four or more.

    y = rotate(T(w T(x / sqrt(mean(x^2) + eps))), position)

with T rounding to the type of x, as MLX's `rms_norm` and `rope` do one after the other. Queries and keys may be columns
of one matrix: the kernel reads rows at any distance, where `rms_norm` copies them first.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx

LANES = 32
"""Number of threads that execute together on Apple's GPUs, and that compute one head of one row."""

SOURCE = """
    const uint lane = thread_position_in_grid.x;
    const uint head = thread_position_in_grid.y;
    const uint row = thread_position_in_grid.z;
    const bool is_key = head >= HEADS;
    const uint own = is_key ? head - HEADS : head;
    const device T* x = is_key ? k + row * k_strides[0] + own * SIZE : q + row * q_strides[0] + own * SIZE;
    const device T* w = is_key ? k_weight : q_weight;
    device T* y = is_key ? keys + (row * KEY_HEADS + own) * SIZE : queries + (row * HEADS + own) * SIZE;

    float sum = 0;
    for (uint i = lane; i < SIZE; i += 32) {
        const float value = static_cast<float>(x[i]);
        sum += value * value;
    }
    const float factor = metal::precise::rsqrt(metal::simd_sum(sum) / SIZE + settings[is_key ? 1 : 0]);
    const float position = settings[3] * static_cast<float>(offset[row]);
    for (uint i = lane; i < SIZE / 2; i += 32) {
        const uint j = i + SIZE / 2;
        const float a = static_cast<float>(static_cast<T>(w[i] * static_cast<T>(static_cast<float>(x[i]) * factor)));
        const float b = static_cast<float>(static_cast<T>(w[j] * static_cast<T>(static_cast<float>(x[j]) * factor)));
        const float angle = position * metal::exp2(-settings[2] * static_cast<float>(i) / (SIZE / 2));
        const float cosine = metal::fast::cos(angle);
        const float sine = metal::fast::sin(angle);
        y[i] = static_cast<T>(a * cosine - b * sine);
        y[j] = static_cast<T>(a * sine + b * cosine);
    }
"""
"""Body of the kernel in Metal's language.

settings: eps of queries, eps of keys, log2 of the base, scale of positions.
"""


@cache
def kernel() -> Any:
    """Return the kernel. Raises RuntimeError without Metal."""
    return mx.fast.metal_kernel(
        name="clotho_norm_rotation",
        input_names=["q", "k", "q_weight", "k_weight", "offset", "settings"],
        output_names=["queries", "keys"],
        source=SOURCE,
        ensure_row_contiguous=False,
    )


def settings_of(layer: Any) -> mx.array:
    """Return the numbers of an attention layer that the kernel reads."""
    return mx.array(
        [layer.q_norm.eps, layer.k_norm.eps, math.log2(layer.rope.base), layer.rope.scale], dtype=mx.float32
    )


def norm_rotation(layer: Any, settings: mx.array, q: mx.array, k: mx.array, offset: mx.array) -> list[mx.array]:
    """Return queries and keys of one token per row, (B, heads, 1, size), normalized and rotated.

    q, k: outputs of the projections, (B, heads x size) each, rows at any distance. offset: positions, (B,).
    """
    rows, heads, key_heads, size = q.shape[0], layer.n_heads, layer.n_kv_heads, layer.rope.dims
    found: list[mx.array] = kernel()(
        inputs=[q, k, layer.q_norm.weight, layer.k_norm.weight, offset, settings],
        template=[("T", q.dtype), ("HEADS", heads), ("KEY_HEADS", key_heads), ("SIZE", size)],
        grid=(LANES, heads + key_heads, rows),
        threadgroup=(LANES, 1, 1),
        output_shapes=[(rows, heads, 1, size), (rows, key_heads, 1, size)],
        output_dtypes=[q.dtype, q.dtype],
    )
    return found


def in_operations(layer: Any, q: mx.array, k: mx.array, offset: mx.array) -> list[mx.array]:
    """Return what `norm_rotation` returns, computed by operations of MLX."""
    size = layer.rope.dims
    return [
        layer.rope(norm(x.reshape(x.shape[0], 1, -1, size)).transpose(0, 2, 1, 3), offset=offset)
        for norm, x in ((layer.q_norm, q), (layer.k_norm, k))
    ]


def difference(layer: Any) -> float:
    """Return the largest difference of the kernel from MLX's operations, relative to the largest value.

    The rows are parts of longer ones, at positions 0 to 4,096. Raises RuntimeError if the kernel cannot be computed.
    """
    rows, size, dtype = 5, layer.rope.dims, layer.q_norm.weight.dtype
    ends = [layer.n_heads * size, (layer.n_heads + layer.n_kv_heads) * size]
    numbers = mx.random.normal((rows, ends[-1] + size), key=mx.random.key(0)).astype(dtype)
    q, k, _ = mx.split(numbers, ends, axis=-1)
    offset = mx.array([0, 1, 17, 500, 4096], dtype=mx.int32)
    some = norm_rotation(layer, settings_of(layer), q, k, offset)
    others = in_operations(layer, q, k, offset)
    found = [
        mx.max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32))) / mx.max(mx.abs(b.astype(mx.float32)))
        for a, b in zip(some, others, strict=True)
    ]
    return float(mx.max(mx.stack(found)))
