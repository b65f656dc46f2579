"""The rotation of queries and keys by their positions, with sines that all layers have in common."""

from __future__ import annotations

import math
from threading import get_ident
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn


class Turn(NamedTuple):
    """Cosines and signed sines of the angles of positions, (B or 1, 1, T, size); `of` says what they were made from.

    thread: the one that made them, for what is not computed yet can be computed in no other.
    """

    of: tuple[int, float, float, int]
    thread: int
    offset: int | mx.array
    cosine: mx.array
    sine: mx.array


class Rotation(nn.RoPE):
    """A rotation of mlx's, by halves (not by neighbours), over whole heads."""

    latest: Turn | None = None

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate (B, heads, T, size) from position `offset`, of all rows or of each, (B,)."""
        if x.dtype != mx.float32 or x.ndim != 4 or x.shape[-1] != self.dims:
            return mx.fast.rope(x, self.dims, traditional=False, base=self.base, scale=self.scale, offset=offset)
        turn = self._turn(offset, x.shape[-2])
        half = self.dims // 2
        crossed = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return x * turn.cosine + crossed * turn.sine

    def _turn(self, offset: int | mx.array, tokens: int) -> Turn:
        """Return what the layer before used, where it stood at the same positions: `offset` is then the same object."""
        of, thread = (self.dims, self.base, self.scale, tokens), get_ident()
        known = Rotation.latest
        if known is None or known[:2] != (of, thread) or not _same(known.offset, offset):
            known = Rotation.latest = Turn(of, thread, offset, *_angles(of, offset))
        return known


def takes(layer: nn.Module) -> bool:
    """Whether `Rotation` computes what this layer computes."""
    return type(layer) is nn.RoPE and not layer.traditional


def frequencies(dims: int, base: float) -> mx.array:
    """Angles per token of the pairs of numbers in a head of `dims`."""
    return mx.exp(-mx.arange(dims // 2, dtype=mx.float32) * (math.log(base) / (dims // 2)))


def _same(one: int | mx.array, other: int | mx.array) -> bool:
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _angles(of: tuple[int, float, float, int], offset: int | mx.array) -> tuple[mx.array, mx.array]:
    """Angles are position * scale * base^(-2 i / size), RoFormer, arXiv:2104.09864, section 3.2.2."""
    dims, base, scale, tokens = of
    first = offset if isinstance(offset, mx.array) else mx.array(offset)
    position_B_T = (first.reshape(-1, 1) + mx.arange(tokens)).astype(mx.float32) * scale
    angle = position_B_T[:, None, :, None] * frequencies(dims, base)
    cosine, sine = mx.cos(angle), mx.sin(angle)
    return mx.concatenate([cosine, cosine], axis=-1), mx.concatenate([-sine, sine], axis=-1)
