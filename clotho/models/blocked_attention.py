"""Attention over long sequences in blocks of queries; the backward pass computes the scores of each block again.

Scores and probabilities of one block exist at a time, so memory is linear in the length instead of quadratic. This is
FlashAttention-2 (arXiv:2307.08691) with a block of keys as long as the row, made of the operations of the backend. Keys
that no query of a block attends to, such as later ones, are left out, which saves more than the second computation
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.stages import after, backward_of, current_block, mark

MOST_KEYS = 1024
"""Number of keys of the longest row whose attention is computed in one piece.

Measured on two CPU cores, forward and backward pass with 4 heads of size 32 and with 9 of size 64: blocks take 1.0 to
1.1 times as long with 512 keys, 0.8 times with 1,024 and with 2,048, and 0.65 times with 4,096.
"""

QUERIES = 128
"""Number of queries of a block. 64 and 256 take 0.94 and 1.07 times as long with 4,096 keys, same measurement."""


def queries_at_once(queries: int, keys: int) -> int:
    """Return how many queries of a row are computed at once: all, or those of a block."""
    return queries if keys <= MOST_KEYS else min(queries, QUERIES)


Span = tuple[slice, slice]
"""The queries of a block, and the keys that they may attend to."""


class VisibleKeys:
    """Which keys each query of a pass attends to: those at positions from `first` up to its own.

    The memory is linear in the number of tokens, unlike that of a mask.
    """

    def __init__(
        self,
        query_B_Q: NDArray[np.int32],
        key_B_S: NDArray[np.int32],
        *,
        first_B_Q: NDArray[np.int32] | None = None,
        window_size: int | None = None,
    ) -> None:
        """Positions of queries, keys, and the first visible keys, for each row, or B = 1 for all; a window is nearer.

        A key that nothing attends to is beyond all queries.
        """
        if window_size is not None:
            start_B_Q = query_B_Q - (window_size - 1)
            first_B_Q = start_B_Q if first_B_Q is None else np.maximum(first_B_Q, start_B_Q)
        self._query_B_Q, self._key_B_S, self._first_B_Q = query_B_Q, key_B_S, first_B_Q

    def block(self, rows: slice, columns: slice) -> mx.array:
        """Return the mask of some queries and keys, (B, 1, queries, keys) booleans."""
        query_B_Q, key_B_S, first_B_Q = self._arrays
        key_B_1_S = key_B_S[:, None, columns]
        seen_B_Q_S = key_B_1_S <= query_B_Q[:, rows, None]
        if first_B_Q is not None:
            seen_B_Q_S = seen_B_Q_S & (key_B_1_S >= first_B_Q[:, rows, None])
        return seen_B_Q_S[:, None]

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """The positions for all blocks: arrays of their own for each block would grow with the square of the length."""
        first_B_Q = None if self._first_B_Q is None else mx.array(self._first_B_Q)
        return mx.array(self._query_B_Q), mx.array(self._key_B_S), first_B_Q

    @cached_property
    def whole(self) -> mx.array:
        """The mask of all queries and keys, (B, 1, Q, S)."""
        return self.block(slice(None), slice(None))

    @cached_property
    def spans(self) -> list[Span]:
        """Blocks of queries, with all keys that one of them attends to in any row."""
        return [(rows, self._columns(rows)) for rows in _blocks(self._query_B_Q.shape[1])]

    def _columns(self, rows: slice) -> slice:
        seen_B_S = self._key_B_S <= self._query_B_Q[:, rows].max(axis=1, keepdims=True)
        if self._first_B_Q is not None:
            seen_B_S = seen_B_S & (self._key_B_S >= self._first_B_Q[:, rows].min(axis=1, keepdims=True))
        columns = np.flatnonzero(seen_B_S.any(axis=0))
        return slice(int(columns[0]), int(columns[-1]) + 1)


def _blocks(count: int) -> list[slice]:
    return [slice(start, min(start + QUERIES, count)) for start in range(0, count, QUERIES)]


def causal(queries: int, keys: int, window_size: int | None = None) -> VisibleKeys:
    """Return the keys of causal attention, where the last query attends to the last key."""
    position_1_S = np.arange(keys, dtype=np.int32)[None]
    return VisibleKeys(position_1_S[:, keys - queries :], position_1_S, window_size=window_size)


class Attend(Protocol):
    """Attention of some queries over some keys."""

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, *sinks: mx.array, mask: mx.array
    ) -> mx.array:
        """Return (B, heads, queries, size), differentiable in all arrays but the mask, which is boolean."""


def blocked_attention(
    attend: Attend,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *sinks: mx.array,
    mask: VisibleKeys | mx.array,
) -> mx.array:
    """Compute attention of queries (B, heads, Q, size) over keys and values (B, key heads, S, size) block by block.

    Equal to `attend` on all queries up to rounding, with its gradients; those of keys, values and sinks are added up in
    float32. Each block is a stage of an evaluation in turns. mask: booleans (..., Q, S), or the keys themselves.
    sinks: at most one array, with a score per head.
    """
    block, B = current_block(), queries.shape[0]
    spans = _spans(mask, queries.shape[2], keys.shape[2])

    @mx.custom_function
    def forward(queries: mx.array, keys: mx.array, values: mx.array, *sinks: mx.array) -> mx.array:
        parts: list[mx.array] = []
        for rows, columns in spans:
            some = after(parts[-1:], queries[:, :, rows])
            parts.append(
                attend(some, keys[:, :, columns], values[:, :, columns], *sinks, mask=_block(mask, rows, columns))
            )
            mark("attention", parts[-1:], work=B * _pairs(rows, columns))
        return mx.concatenate(parts, axis=2)

    @forward.vjp
    def backward(primals: Sequence[mx.array], cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        """Return the gradients, block by block from the last, with one sum per array that blocks share."""
        queries, *shared = primals
        with backward_of(block):
            mark("block gradient", [cotangent], work=B * queries.shape[2])
            parts: list[mx.array] = []
            sums = [mx.zeros(array.shape) for array in shared]
            for rows, columns in reversed(spans):
                before = [*sums, *parts[-1:]]  # else results of many blocks wait to be computed, with their scores
                inputs = [after(before, queries[:, :, rows]), *(_part(array, columns) for array in shared)]

                def one(*inputs: mx.array, rows: slice = rows, columns: slice = columns) -> mx.array:
                    return attend(*inputs, mask=_block(mask, rows, columns))

                _, (d_queries, *gradients) = mx.vjp(one, inputs, [cotangent[:, :, rows]])
                parts.append(d_queries)
                sums = [_added(total, part, columns) for total, part in zip(sums, gradients, strict=True)]
                mark("attention gradient", [d_queries, *sums], work=B * _pairs(rows, columns))
        narrow = (total.astype(array.dtype) for total, array in zip(sums, shared, strict=True))
        return mx.concatenate(parts[::-1], axis=2), *narrow

    return cast(mx.array, forward(queries, keys, values, *sinks))


def _spans(mask: VisibleKeys | mx.array, queries: int, keys: int) -> list[Span]:
    if isinstance(mask, VisibleKeys):
        return mask.spans
    return [(rows, slice(0, keys)) for rows in _blocks(queries)]


def _block(mask: VisibleKeys | mx.array, rows: slice, columns: slice) -> mx.array:
    return mask.block(rows, columns) if isinstance(mask, VisibleKeys) else mask[..., rows, columns]


def _pairs(rows: slice, columns: slice) -> int:
    pairs: int = (rows.stop - rows.start) * (columns.stop - columns.start)
    return pairs


def _part(array: mx.array, columns: slice) -> mx.array:
    """Return the columns of keys or values; sinks, which have one axis, as they are."""
    return array[:, :, columns] if array.ndim > 1 else array


def _added(total: mx.array, part: mx.array, columns: slice) -> mx.array:
    """Return the sum with a part for some columns added to it."""
    if total.ndim == 1:
        return total + part
    changed = mx.array(total)
    changed[:, :, columns] = total[:, :, columns] + part
    return changed
