"""Attention of whole sequences, and its gradient.

The rotation of queries and keys by their positions, with sines that all layers have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn

from clotho.cpu.exponential import exp

UNSEEN = -1e30
"""What is added to the score of a key that a query does not see."""


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None
) -> mx.array | None:
    """Attention, (B, heads, Q, size), of queries over keys and values (B, key heads, S, size).

    mask: (B or 1, 1, Q, S) booleans, True where a query sees a key; "causal"; or None. None where arrays or mask are of
    another kind.
    """
    if not _is_plain(mask) or any(array.dtype != mx.float32 for array in (queries, keys, values)):
        return None
    B, heads, Q, size = queries.shape
    K = keys.shape[1]
    unseen = _unseen(mask, Q, keys.shape[2])
    queries_B_K_R_D = (queries * scale).reshape(B, K, heads // K * Q, size)
    return _attention(queries_B_K_R_D, keys, values, unseen).reshape(B, heads, Q, values.shape[-1])


def _is_plain(mask: mx.array | str | None) -> bool:
    if isinstance(mask, mx.array):
        return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))
    return mask is None or mask == "causal"


def _unseen(mask: mx.array | str | None, Q: int, S: int) -> mx.array | None:
    """What to add to scores, (B or 1, 1, 1, Q, S)."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = mx.arange(S - Q, S)[:, None] >= mx.arange(S)
    seen = mask.reshape(-1, 1, 1, Q, S).astype(mx.float32)
    return (seen - 1.0) * -UNSEEN


def _attention(
    queries_B_K_R_D: mx.array, keys_B_K_S_D: mx.array, values_B_K_S_D: mx.array, unseen: mx.array | None
) -> mx.array:
    """R counts the queries of all heads that share a key head, head by head."""

    @mx.custom_function
    def forward(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        score = queries @ keys.swapaxes(-1, -2)
        if unseen is not None:
            B, K, R, S = score.shape
            score = (score.reshape(B, K, -1, *unseen.shape[-2:]) + unseen).reshape(B, K, R, S)
        weight = exp(score - mx.max(score, axis=-1, keepdims=True))
        total = mx.sum(weight, axis=-1, keepdims=True)
        return (weight @ values) / total, weight, total

    @forward.vjp
    def backward(
        primals: Sequence[mx.array], cotangents: Sequence[mx.array], found: Sequence[mx.array]
    ) -> tuple[mx.array, ...]:
        """With p the weights over their total, and o the result: d score = p (g v - g o)."""
        queries, keys, values = primals
        result, weight, total = found
        g = cotangents[0] / total
        along = mx.sum(g * result, axis=-1, keepdims=True)
        of_score = weight * (g @ values.swapaxes(-1, -2) - along)
        return of_score @ keys, of_score.swapaxes(-1, -2) @ queries, weight.swapaxes(-1, -2) @ g

    return cast(Sequence[mx.array], forward(queries_B_K_R_D, keys_B_K_S_D, values_B_K_S_D))[0]


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


def is_replaceable_rope(layer: nn.Module) -> bool:
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
