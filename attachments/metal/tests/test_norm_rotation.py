"""The kernel for norms and rotations: its source computes what MLX's operations compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from attachments.metal.norm_rotation import SOURCE, in_operations, settings_of
from attachments.metal.tests.lanes_of_a_kernel import Argument, execute
from tests.small_models import tiny

ROWS = 3
OFFSETS = np.array([0, 7, 900], np.int32)


def layer_with(size: int, dtype: mx.Dtype) -> Any:
    """Return an attention layer with random norms."""
    model: Any = tiny("qwen3", head_dim=size, rope_theta=50000.0)
    layer = model.layers[0].self_attn
    mx.random.seed(1)
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight = (1.0 + 0.3 * mx.random.normal((size,))).astype(dtype)
    return layer


@pytest.mark.parametrize(
    ("size", "dtype", "tolerance"), [(128, mx.float32, 5e-4), (16, mx.float16, 8e-3)], ids=["128 float32", "16 float16"]
)
def test_the_source_computes_what_mlx_computes(size: int, dtype: mx.Dtype, tolerance: float, tmp_path: Path) -> None:
    """Compiled as C++: rows are parts of longer rows, and each head of each row has 32 lanes.

    An angle at position 900 has an error of 1e-4, because float32 has 24 bits.
    """
    layer = layer_with(size, dtype)
    heads, key_heads = layer.n_heads, layer.n_kv_heads
    width, key_width = heads * size, key_heads * size
    whole = np.array(mx.random.normal((ROWS, width + key_width + 5)).astype(dtype))
    q, k = mx.array(whole[:, :width]), mx.array(whole[:, width : width + key_width])
    distance = np.array([whole.shape[1], 1], np.int64)
    arguments = [
        Argument("q", "const T*", whole),
        Argument("k", "const T*", whole.ravel()[width:]),
        Argument("q_weight", "const T*", np.array(layer.q_norm.weight)),
        Argument("k_weight", "const T*", np.array(layer.k_norm.weight)),
        Argument("offset", "const int32_t*", OFFSETS),
        Argument("settings", "const float*", np.array(settings_of(layer))),
        Argument("q_strides", "const int64_t*", distance),
        Argument("k_strides", "const int64_t*", distance),
        Argument("queries", "T*", (ROWS, heads, 1, size)),
        Argument("keys", "T*", (ROWS, key_heads, 1, size)),
    ]
    kind = {mx.float32: "float", mx.float16: "_Float16"}[dtype]
    constants = f"using T = {kind}; constexpr int HEADS = {heads}, KEY_HEADS = {key_heads}, SIZE = {size};"
    found = execute(SOURCE, constants, arguments, groups=(heads + key_heads, ROWS), out=whole.dtype.type, at=tmp_path)
    expected = in_operations(layer, q, k, mx.array(OFFSETS))
    for some, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(some.astype(np.float32), np.array(others.astype(mx.float32)), atol=tolerance)


def test_operations_of_mlx_are_those_of_the_layer() -> None:
    """`in_operations`, which the kernel is compared with, is what mlx-lm's layer computes before its attention."""
    layer = layer_with(8, mx.float32)
    assert type(layer) is qwen3.Attention
    x = mx.random.normal((ROWS, 1, 32))
    seen: list[mx.array] = []

    class Cache:
        offset = mx.array(OFFSETS)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            seen.append(keys)
            return keys, values

        def attend(self, queries: mx.array, *_: Any, **__: Any) -> mx.array:
            seen.append(queries)
            return queries

    layer(x, None, Cache())
    q, k = (project(x).reshape(ROWS, -1) for project in (layer.q_proj, layer.k_proj))
    queries, keys = in_operations(layer, q, k, mx.array(OFFSETS))
    assert mx.array_equal(seen[0], keys).item()
    assert mx.array_equal(seen[1], queries).item()
