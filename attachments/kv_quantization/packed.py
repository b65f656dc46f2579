"""Keys and values in MLX's affine format: groups of 8-bit numbers q with a scale s and a bias b, x = s q + b.

On a GPU, products read the packed arrays (`mx.quantized_matmul`), so that a decode step reads about 0.53 of the bytes
of 16 bits. On a CPU, the columns of one layer are expanded before its products: MLX's quantized products take longer
there, and in 16 bits they add in 16 bits. Both compute attention over the same rounded keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from clotho.inference.kv_format import PLAIN, Held, KVFormat, Vectors
from protocols.errors import ModelError

BITS = 8
PER_WORD = 32 // BITS

GROUP_SIZES = (64, 32)
"""Group sizes in the order in which they are chosen. Scale and bias have the type of keys and values, so that a number
takes 8.5 bits with 64 numbers per group in 16 bits."""


class PackedFormat(KVFormat):
    """Keys and values as (words of four numbers, scales, biases), (rows, heads, tokens, n) each."""

    setting = "engine.kv_quantization"

    def __init__(self, group_size: int | None) -> None:
        """group_size: `engine.kv_quantization.group_size`."""
        self._group_size = group_size

    def check(self, vectors: Sequence[Vectors]) -> None:
        """Raise ModelError without keys and values, and for heads that are no whole number of groups."""
        if not vectors:
            raise ModelError(f"{self.setting}: no layer of this model has keys and values; leave it off")
        sizes = {size for one in vectors for _, size in (one.key_shape, one.value_shape)}
        for size in sorted(sizes):
            if size % self._group(size):
                raise ModelError(
                    f"{self.setting}: the heads of this model have {size} numbers, which is no multiple of the "
                    f"group size {self._group(size)}; set group_size to a divisor, or type to off"
                )

    def _group(self, size: int) -> int:
        if self._group_size is not None:
            return self._group_size
        return next((group for group in GROUP_SIZES if size % group == 0), GROUP_SIZES[-1])

    def bytes(self, size: int, dtype: mx.Dtype) -> int:
        """Return the bytes of a vector of `size` numbers, with its scales and biases."""
        return int(size * BITS // 8 + 2 * (size // self._group(size)) * dtype.size)

    def empty(self, rows: int, heads: int, size: int, dtype: mx.Dtype) -> Held:
        """Return arrays without tokens."""
        groups = size // self._group(size)
        shape = (rows, heads, 0)
        words = mx.zeros((*shape, size // PER_WORD), mx.uint32)
        return words, mx.zeros((*shape, groups), dtype), mx.zeros((*shape, groups), dtype)

    def packed(self, vectors: mx.array) -> Held:
        """Quantize keys or values, (rows, heads, tokens, size)."""
        words, scales, biases = mx.quantize(vectors, group_size=self._group(vectors.shape[-1]), bits=BITS)
        return words, scales, biases

    def unpacked(self, held: Held) -> mx.array:
        """Return the rounded keys or values."""
        words, scales, biases = held
        return mx.dequantize(words, scales, biases, group_size=_group_of(held), bits=BITS)

    def transposed(self, held: Held) -> Held:
        """Return keys as they are: products transpose them."""
        return held

    def scores(self, query: mx.array, keys: Held, bias: mx.array, scale: float) -> mx.array:
        """Return scale x query x keys + bias."""
        if _on_gpu():
            return _product(query * scale, keys, transpose=True) + bias
        return PLAIN.scores(query, PLAIN.transposed((self.unpacked(keys),)), bias, scale)

    def sums(self, weight: mx.array, values: Held, part: mx.array | None = None) -> mx.array:
        """Return weight x values + part."""
        if not _on_gpu():
            return PLAIN.sums(weight, (self.unpacked(values),), part)
        found = _product(weight, values, transpose=False)
        return found if part is None else found + part

    def attend(self, queries: mx.array, keys: Held, values: Held, *, scale: float, mask: mx.array | None) -> mx.array:
        """Return attention. On a GPU, MLX's fused kernel is replaced by two products and a softmax."""
        if not _on_gpu():
            return PLAIN.attend(queries, (self.unpacked(keys),), (self.unpacked(values),), scale=scale, mask=mask)
        (B, heads, T, D), K = queries.shape, keys[0].shape[1]
        query = queries.reshape(B, K, heads // K * T, D)
        score = _product(query * scale, keys, transpose=True).reshape(B, heads, T, -1)
        if mask is not None:
            score = mx.where(mask, score, mx.array(-mx.inf, score.dtype))
        weight = mx.softmax(score, axis=-1, precise=True).reshape(B, K, heads // K * T, -1)
        return self.sums(weight, values).reshape(B, heads, T, -1)


def _on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


def _group_of(held: Held) -> int:
    words, scales, _ = held
    return int(words.shape[-1] * PER_WORD // scales.shape[-1])


def _product(x: mx.array, held: Held, *, transpose: bool) -> mx.array:
    words, scales, biases = held
    return mx.quantized_matmul(x, words, scales, biases, transpose=transpose, group_size=_group_of(held), bits=BITS)
