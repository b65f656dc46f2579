"""Emulates the split-K matrix products of Metal in decode steps, so that sampler and learner round as differently.

Metal's kernel for products of few rows splits the inner dimension into parts, stores the partial sums in the type of
the result, and adds them in this type. On MLX's CPU backend, the result of a row does not depend on the number of
rows. Therefore 16-bit log-probabilities of decode steps and of whole sequences are equal on the CPU, and differ on
Metal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from clotho.inference.kv_cache import BatchKVCache

PART = 64
"""Number of inputs of a partial sum; Metal's smallest."""

ROWS = range(13, 513)
"""Numbers of rows for which Metal splits the inner dimension."""


@contextmanager
def split_k(*, part: int = PART, rows: range = ROWS) -> Iterator[None]:
    """Compute the linear layers of decode steps by split-K products inside the context.

    Applies to plain and quantized linear layers, LoRA's base layers and tied heads, in steps of the device path with a
    number of rows in `rows`. In prefill and teacher forcing, products with quantized weights are added in float32, as
    on Metal; MLX's CPU kernels for quantized weights add them in 16 bits.
    """
    weights = _Float32Weights()
    decoding = [False]
    step = BatchKVCache.parts

    def parts(cache: BatchKVCache, *given: Any, divided: bool) -> Generator[None, None, mx.array]:
        computing = step(cache, *given, divided=divided)
        decoding[0] = cache.rows in rows
        try:
            next(computing)  # builds the graph
        finally:
            decoding[0] = False
        yield
        return (yield from computing)

    def product(x: mx.array, weight: mx.array, dense: Callable[[], mx.array]) -> mx.array:
        """Return x W^T, in decode steps by split-K. dense: computes the weight, (outputs, inputs)."""
        weight_O_I = weights.of(weight, dense)
        if not decoding[0]:
            return (x.astype(mx.float32) @ weight_O_I.T).astype(x.dtype)
        return _split(x, weight_O_I, part)

    def linear(layer: Any, x: mx.array) -> mx.array:
        if not decoding[0]:
            usual: mx.array = plain[nn.Linear, "__call__"](layer, x)
            return usual
        y: mx.array = product(x, layer.weight, lambda: layer.weight)
        return y + layer["bias"] if "bias" in layer else y

    def tied(layer: Any, x: mx.array) -> mx.array:
        if not decoding[0]:
            usual: mx.array = plain[nn.Embedding, "as_linear"](layer, x)
            return usual
        return product(x, layer.weight, lambda: layer.weight)

    def quantized(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, **packing: Any) -> mx.array:
        if not packing.pop("transpose", True):
            return packed(x, w, scales, biases, transpose=False, **packing)
        return product(x, w, lambda: mx.dequantize(w, scales, biases, **packing))

    plain: dict[tuple[type, str], Any] = {
        (nn.Linear, "__call__"): nn.Linear.__call__,
        (nn.Embedding, "as_linear"): nn.Embedding.as_linear,
    }
    packed = mx.quantized_matmul
    with (
        mock.patch.object(BatchKVCache, "parts", parts),
        mock.patch.object(nn.Linear, "__call__", linear),
        mock.patch.object(nn.Embedding, "as_linear", tied),
        mock.patch.object(mx, "quantized_matmul", quantized),
    ):
        yield


class _Float32Weights:
    """Weights in float32, each computed once."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[mx.array, mx.array]] = {}

    def of(self, weight: mx.array, dense: Callable[[], mx.array]) -> mx.array:
        """Return the weight, (outputs, inputs). dense: computes it."""
        found = self._found.get(id(weight))
        if found is None or found[0] is not weight:
            found = self._found[id(weight)] = (weight, dense().astype(mx.float32))
            mx.eval(found)
        return found[1]


def _split(x: mx.array, weight_O_I: mx.array, part: int) -> mx.array:
    total: mx.array | None = None
    for start in range(0, weight_O_I.shape[1], part):
        inputs = slice(start, start + part)
        partial = (x[..., inputs].astype(mx.float32) @ weight_O_I[:, inputs].T).astype(x.dtype)
        total = partial if total is None else total + partial
    assert total is not None
    return total
