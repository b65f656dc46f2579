"""How the KV cache of running rows holds keys and values: as arrays of their own type, or as an attachment packs them.

A format computes the products of attention with what is held, so that packed keys and values need not be expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

Held = tuple[mx.array, ...]
"""Keys or values as they are held: arrays (rows, heads, tokens, n), each with an n of its own."""


def each(change: Callable[[mx.array], mx.array], held: Held) -> Held:
    """Apply a function to the arrays; it changes rows and tokens, and no other axis."""
    return tuple(change(array) for array in held)


class Vectors(Protocol):
    """The keys and values of one layer, of which a format says whether it can hold them."""

    @property
    def key_shape(self) -> tuple[int, int]:
        """Heads, and the size of a key."""

    @property
    def value_shape(self) -> tuple[int, int]:
        """Heads, and the size of a value."""


class KVFormat:
    """Keys and values in their own type; a subclass packs them. setting: key that does so; empty: nothing rounds."""

    setting = ""

    @property
    def is_packed(self) -> bool:
        """Whether they are held as something else than arrays in their own type."""
        return bool(self.setting)

    def check(self, vectors: Sequence[Vectors]) -> None:
        """Raise ModelError if the keys and values of these layers cannot be held."""

    def bytes(self, size: int, dtype: mx.Dtype) -> int:
        """Return the bytes of a vector of `size` numbers of this type."""
        return int(size * dtype.size)

    def empty(self, rows: int, heads: int, size: int, dtype: mx.Dtype) -> Held:
        """Return arrays without tokens."""
        return (mx.zeros((rows, heads, 0, size), dtype),)

    def packed(self, vectors: mx.array) -> Held:
        """Return keys or values, (rows, heads, tokens, size), as they are held."""
        return (vectors,)

    def unpacked(self, held: Held) -> mx.array:
        """Return what `packed` was given, up to rounding."""
        return held[0]

    def transposed(self, held: Held) -> Held:
        """Return keys as `scores` takes them."""
        return (held[0].swapaxes(-1, -2),)

    def scores(self, query: mx.array, keys: Held, bias: mx.array, scale: float) -> mx.array:
        """Return scale x query x keys + bias, (..., n, tokens). query: (..., n, size); keys: `transposed`."""
        return mx.addmm(bias, query, keys[0], alpha=scale)

    def sums(self, weight: mx.array, values: Held, part: mx.array | None = None) -> mx.array:
        """Return weight x values + part, (..., n, size). weight: (..., n, tokens); part: None for 0."""
        return weight @ values[0] if part is None else mx.addmm(part, weight, values[0])

    def attend(self, queries: mx.array, keys: Held, values: Held, *, scale: float, mask: mx.array | None) -> mx.array:
        """Return attention of queries, (rows, heads, T, size). mask: of booleans, as MLX's attention takes it."""
        return mx.fast.scaled_dot_product_attention(queries, keys[0], values[0], scale=scale, mask=mask)


PLAIN = KVFormat()
"""Keys and values in their own type."""
