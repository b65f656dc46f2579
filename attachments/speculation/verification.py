"""The KV cache of a batch in MLX whose steps can verify drafts: several tokens per row, of which each row keeps some.

A verification writes the newest token and the draft of a row into columns behind the row's own tokens. Each row keeps a
number of them that shows only after sampling, so that rows end in different columns: a row lags behind the column that
is written next. The columns are aligned again when they are moved, and before a step without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.cache_layout import CacheLayout, Logits, RowCaches, evaluation_mode
from clotho.inference.kv_cache import Ahead, BatchKVCache, ColumnState, LayerKVCache
from clotho.inference.row_runs import RowRun
from clotho.inference.rows import DraftedTokens, PrefilledPrompt
from clotho.inference.shared_prompts import grouped_attention


class VerifyingCaches(RowCaches, Protocol):
    """KV caches whose steps can verify drafts: several tokens per row, of which each row keeps some.

    `VerifyingKVCache` implements it in MLX, and the caches of every `RowDecoder` do.
    computes_tokens_as_rows: whether adapters are selected per token of a verification, or per row.
    """

    computes_tokens_as_rows: bool

    @property
    def is_lagging(self) -> bool:
        """Whether the rows have kept different numbers of tokens, so that a step without drafts moves columns."""

    def verify(self, tokens: DraftedTokens, positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]) -> Logits:
        """Return the logits of the newest token and the draft of every row, (N, V), in a new array.

        `keep` must follow: until then, no row has kept a token.
        """

    def keep(self, kept_B: NDArray[np.int64]) -> None:
        """Keep the first `kept_B` tokens of each row of the verification, 0 for rows that are not due."""

    def discard(self, count_B: NDArray[np.int64]) -> None:
        """Discard the newest `count_B` tokens of each row. If any count is not 0, rows with count 0 have no tokens."""


class VerifyingColumns(ColumnState):
    """The columns of all layers, for rows that lag.

    lag_B: number of columns from the newest token of each row to that of the foremost row; None if all are 0. width:
    number of tokens per row of the current step. writes: columns that the current verification writes, (B, 1, T, 1);
    None in a step without drafts.
    """

    def __init__(self, layout: CacheLayout, window: int | None) -> None:
        super().__init__(layout, window)
        self.lag_B: NDArray[np.int64] | None = None
        self.width = 1
        self.writes: mx.array | None = None
        self._hidden: dict[int | None, NDArray[np.bool_]] = {}
        self._start_B = np.zeros(0, dtype=np.int64)
        self._verify_masks: dict[int | None, mx.array] = {}
        self._verify_biases: dict[tuple[mx.Dtype, int], mx.array] = {}

    def move(self, longest: int, column: int, ahead: Ahead, slots: Sequence[int] | None = None) -> None:
        """Align the columns and move them, as `ColumnState.move` does."""
        if self.lag_B is not None:
            column_B_C = np.maximum(np.arange(self.column) - self.lag_B[:, None], 0).astype(np.int32)
            index = mx.array(column_B_C[:, None, :, None])
            for cache in self.caches:
                cache.change(partial(mx.take_along_axis, indices=index, axis=2))
            self.lag_B = None
        super().move(longest, column, ahead, slots)

    def begin(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], offset_B: mx.array, ahead: Ahead
    ) -> None:
        """Prepare a step without drafts."""
        self.width, self.writes = 1, None
        if self.lag_B is not None:
            longest = int(self.held(positions_B)[live_B].max())
            self.move(longest, longest, ahead)
        super().begin(positions_B, live_B, offset_B, ahead)

    def begin_verification(
        self,
        tokens: DraftedTokens,
        positions_B: NDArray[np.int32],
        due_B: NDArray[np.bool_],
        offset_B: mx.array,
        ahead: Ahead,
    ) -> None:
        """Prepare a verification. Rows that are not due write behind the foremost row, and keep nothing."""
        held_B, width = np.where(due_B, self.held(positions_B), 0), tokens.width
        if self.column + width > self.capacity:
            ahead = ahead._replace(steps=max(ahead.steps, width))  # a row can use more than is reserved for it so far
            self.move(int(held_B.max()), int(held_B.max()), ahead)
        lag_B = np.zeros(len(held_B), dtype=np.int64) if self.lag_B is None else np.where(due_B, self.lag_B, 0)
        self._start_B, self.width = self.column - lag_B, width
        self.first = int((self._start_B - held_B).min())
        self.offset_B, self._held_B = offset_B, held_B
        self.runs = [RowRun(slice(0, len(held_B)), self.column + width - self.first)]
        column_B_T = self._start_B[:, None] + np.arange(width)
        self.writes = mx.array(column_B_T[:, None, :, None].astype(np.int32))
        self._hidden, self._verify_masks, self._verify_biases = {}, {}, {}
        if self.prompts is not None:
            self.prompts.begin(due_B)

    def _hidden_columns(self, window: int | None) -> NDArray[np.bool_]:
        """Return which visible columns each of the T tokens of a row does not attend to, (B, T, columns)."""
        if window not in self._hidden:
            column_C = np.arange(self.first, self.column + self.width)
            behind_B_C = column_C - self._start_B[:, None]
            distance_B_T_C = np.arange(self.width)[:, None] - behind_B_C[:, None]
            hidden_B_T_C = (distance_B_T_C < 0) | (behind_B_C < -self._held_B[:, None])[:, None]
            if window is not None:
                hidden_B_T_C |= distance_B_T_C >= window
            self._hidden[window] = hidden_B_T_C
        return self._hidden[window]

    def verify_mask(self, window: int | None) -> mx.array:
        """Return which visible columns each token attends to, with the axes of `ColumnState.mask`."""
        if window not in self._verify_masks:
            visible_B_T_C = mx.array(~self._hidden_columns(window))
            B, T, C = visible_B_T_C.shape
            heads = self._layout.query_heads
            if heads is None:
                mask = visible_B_T_C.reshape(B, *[1] * (self._layout.mask_axes - 3), T, C)
            else:
                mask = mx.contiguous(mx.broadcast_to(visible_B_T_C[:, None], (B, heads, T, C)))
            self._verify_masks[window] = mask
        return self._verify_masks[window]

    def verify_bias(self, dtype: mx.Dtype, repeats: int) -> mx.array:
        """Return what to add to the scores of own columns, (B, 1, repeats x T, 1, columns)."""
        key = (dtype, repeats)
        if key not in self._verify_biases:
            hidden_B_Q_C = np.tile(self._hidden_columns(None), (1, repeats, 1))
            bias_B_Q_C = np.where(hidden_B_Q_C, np.float32(-np.inf), np.float32(0.0))
            self._verify_biases[key] = mx.array(bias_B_Q_C[:, None, :, None]).astype(dtype)
        return self._verify_biases[key]

    def keep(self, kept_B: NDArray[np.int64]) -> None:
        """Keep the first `kept_B` tokens of each row of the verification."""
        end_B = self._start_B + kept_B
        self.column = int(end_B.max())
        lag_B = np.where(kept_B > 0, self.column - end_B, 0)
        self.lag_B = lag_B if lag_B.any() else None
        self.width, self.writes = 1, None

    def discard(self, count_B: NDArray[np.int64]) -> None:
        """Discard the newest `count_B` tokens of each row, at least one of some row; other rows have no tokens."""
        end_B = self.column - (0 if self.lag_B is None else self.lag_B) - count_B
        self.column = int(end_B[count_B > 0].max())
        lag_B = np.where(count_B > 0, self.column - end_B, 0)
        self.lag_B = lag_B if lag_B.any() else None

    def own(self, slot: int, tokens: int) -> slice:
        """Return the columns of a row of which `tokens` are in columns."""
        lag = 0 if self.lag_B is None else int(self.lag_B[slot])
        return slice(self.column - lag - tokens, self.column - lag)

    def entered(self, slots: Sequence[int]) -> None:
        """Prepare slots for new rows, whose tokens end at the column that is written next."""
        if self.lag_B is not None:
            self.lag_B[list(slots)] = 0

    def grow(self, rows: int) -> None:
        """Append `rows` empty slots."""
        if self.lag_B is not None:
            self.lag_B = np.append(self.lag_B, np.zeros(rows, dtype=np.int64))


class VerifyingLayerCache(LayerKVCache):
    """The KV cache of one attention layer, with the interface that mlx-lm's models use."""

    columns: VerifyingColumns

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the tokens of the step, and return all visible columns, (B, heads, columns, size)."""
        writes = self.columns.writes
        if writes is None:
            return super().update_and_fetch(keys, values)
        self.keys, self.values = (
            tuple(
                mx.put_along_axis(array, writes, part, axis=2)
                for array, part in zip(held, self.format.packed(new), strict=True)
            )
            for held, new in ((self.keys, keys), (self.values, values))
        )
        return self.keys_and_values()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one step. Name and arguments are mlx-lm's."""
        if self.columns.writes is None:
            return super().make_mask(N, return_array, window_size)
        return self.columns.verify_mask(window_size)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
    ) -> mx.array | None:
        """Compute attention over shared prompts and own columns; None if no prompt is shared."""
        shared = self.columns.prompts
        if shared is None or self.prompts is None or self.columns.writes is None:
            return super().attend(queries, keys, values, scale=scale, mask=mask)
        key_heads = keys.shape[1]
        repeats = queries.shape[1] // key_heads
        indices = shared.indices(key_heads, repeats * self.columns.width, queries.dtype)
        bias_B_C = self.columns.verify_bias(queries.dtype, repeats)
        return grouped_attention(
            queries, self.own(keys, values), self.prompts, indices, bias_B_C, scale, self.columns.runs
        )


class VerifyingKVCache(BatchKVCache):
    """KV caches of the slots of a batch in MLX. All layers attend to all tokens."""

    columns_type = VerifyingColumns
    computes_tokens_as_rows = False
    columns: dict[int | None, VerifyingColumns]  # type: ignore[assignment]

    def __init__(self, layout: CacheLayout, rows: int, limit: int) -> None:
        super().__init__(layout, rows, limit, VerifyingLayerCache)

    @property
    def is_lagging(self) -> bool:
        """Whether the newest tokens of the rows are in different columns."""
        return any(columns.lag_B is not None for columns in self.columns.values())

    def enter(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Store a prompt for slots."""
        for columns in self.columns.values():
            columns.entered(slots)
        super().enter(slots, prompt)

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        for columns in self.columns.values():
            columns.grow(rows)
        super().grow(rows)

    def verify(self, tokens: DraftedTokens, positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]) -> mx.array:
        """Compute the logits of the newest token and the draft of every row, (N, V), not yet evaluated.

        `keep` must follow: until then, no row has kept a token. Rows with shorter drafts are padded.
        """
        offset_B, ahead, width = mx.array(positions_B), self._ahead(positions_B, due_B), tokens.width
        for columns in self.columns.values():
            columns.begin_verification(tokens, positions_B, due_B, offset_B, ahead)
        token_B_T = mx.array(np.maximum(tokens.padded(tokens.token_N), 0))
        with evaluation_mode(self.layout.model):
            logits_B_T_V = self.layout.compute(token_B_T, self.nested)
        flat = mx.flatten(logits_B_T_V, 0, 1)
        if flat.shape[0] == len(tokens.token_N):
            return flat
        return flat[mx.array((tokens.row_N * width + tokens.index_N).astype(np.int32))]

    def keep(self, kept_B: NDArray[np.int64]) -> None:
        """Keep the first `kept_B` tokens of each row of the verification; later steps overwrite the others."""
        for columns in self.columns.values():
            columns.keep(kept_B)

    def discard(self, count_B: NDArray[np.int64]) -> None:
        """Discard the newest `count_B` tokens of each row. If any count is not 0, rows with count 0 have no tokens."""
        if count_B.any():
            for columns in self.columns.values():
                columns.discard(count_B)
