"""Attention of whole sequences, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

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
