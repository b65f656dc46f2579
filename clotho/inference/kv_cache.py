"""The key-value cache of a batch whose rows differ in length and come and go.

Attention does not care about the order of keys once positions are rotated into them, so a row's keys may stand
anywhere. Here they stand right-aligned: every row writes its next key into the same column, one slice for the whole
batch, and the tokens of a row that has n of them are the n columns before it. A row joins by copying its prompt's
keys to the left of the current column; nothing is ever realigned. When the columns run out, the visible ones move to
the front of a new buffer, once in many steps. A sliding window is the same with fewer visible columns.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def spare_columns(visible: int) -> int:
    """Columns to allocate beyond the visible ones: one copy of the cache in so many steps."""
    return max(64, visible // 8)


class ColumnTrack:
    """Where the rows stand in all layers that see the same number of tokens. Lengths in tokens.

    window: how many tokens a layer sees at most, the newest included; None = all.
    column: where the next token is written. capacity: columns of the buffers.
    """

    def __init__(self, window: int | None, mask_axes: int = 4) -> None:
        self.window = window
        self._mask_axes = mask_axes
        self.capacity = 0
        self.column = 0
        self.caches: list[ColumnCache] = []
        self.first = 0
        self.offset_B = mx.array([0])
        self._positions_B: NDArray[np.int32] = np.zeros(1, dtype=np.int32)
        self._uniform = True
        self._masks: dict[int | None, mx.array | None] = {}

    def visible(self, tokens: int) -> int:
        """Return how many of a row's `tokens` a layer sees."""
        return tokens if self.window is None else min(tokens, self.window)

    def place(self, longest: int, column: int) -> None:
        """Move the visible columns of rows with up to `longest` tokens so that they end before `column`."""
        kept = min(self.visible(longest), self.column)
        capacity = column + spare_columns(column)
        for cache in self.caches:
            cache.keys = _placed(cache.keys, self.column - kept, self.column, column, capacity)
            cache.values = _placed(cache.values, self.column - kept, self.column, column, capacity)
        self.column, self.capacity = column, capacity

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], offset_B: mx.array) -> None:
        """Prepare one step in which every row adds one token after the `positions_B` it already has."""
        longest = int(positions_B[live_B].max())
        if self.column >= self.capacity:
            self.place(longest, self.visible(longest))
        self.first = self.column + 1 - self.visible(longest + 1)
        self.offset_B = offset_B
        self._positions_B = positions_B
        self._uniform = bool((positions_B[live_B] >= self.visible(longest + 1) - 1).all())
        self._masks = {}

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | None:
        """Return which visible columns each row may attend to, (B, 1, 1, columns); None = all of them.

        A narrower `window` than the track's own hides older columns. Where the track was made for models that add the
        mask to scores in groups of heads, it has one axis more.
        """
        extent = self.column + 1 - self.first
        narrow = window is not None and window < extent
        if self._uniform and not narrow and not as_array:
            return None
        key = window if narrow else None
        if key not in self._masks:
            age_C = mx.arange(extent - 1, -1, -1)
            mask_B_C = age_C[None] <= mx.array(self._positions_B)[:, None]
            if key is not None:
                mask_B_C = mask_B_C & (age_C[None] < key)
            self._masks[key] = mask_B_C.reshape(mask_B_C.shape[0], *[1] * (self._mask_axes - 2), extent)
        return self._masks[key]

    def end(self) -> None:
        """Finish the step: the column is written."""
        self.column += 1


def _placed(x: mx.array, start: int, stop: int, column: int, capacity: int) -> mx.array:
    rows, heads, _, size = x.shape
    left = mx.zeros((rows, heads, column - (stop - start), size), x.dtype)
    right = mx.zeros((rows, heads, capacity - column, size), x.dtype)
    return mx.concatenate([left, x[:, :, start:stop], right], axis=2)


class ColumnCache:
    """One attention layer's cache, in the shape that mlx-lm's models expect of a batch cache while decoding."""

    def __init__(self, track: ColumnTrack, keys: mx.array, values: mx.array) -> None:
        self.track = track
        self.keys = keys
        self.values = values
        track.caches.append(self)

    @property
    def offset(self) -> mx.array:
        """Tokens each row already has, (B,)."""
        return self.track.offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the newest token of every row and return all visible ones, (B, heads, columns, size)."""
        column = self.track.column
        self.keys[:, :, column : column + 1] = keys
        self.values[:, :, column : column + 1] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the visible columns; some models share them between layers."""
        first, last = self.track.first, self.track.column + 1
        return self.keys[:, :, first:last], self.values[:, :, first:last]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one decoding step; the name and the arguments are mlx-lm's."""
        if N != 1:
            raise ValueError(f"a decode cache takes one token at a time, not {N}")
        return self.track.mask(window_size, as_array=return_array)

    def write(self, slots: slice, keys: mx.array, values: mx.array) -> None:
        """Put the keys and values of a computed prompt, (1, heads, tokens, size), before the current column."""
        column, tokens = self.track.column, keys.shape[2]
        self.keys[slots, :, column - tokens : column] = keys
        self.values[slots, :, column - tokens : column] = values

    def take(self, slot_N: mx.array) -> None:
        """Keep only the rows of these slots, in this order."""
        self.keys, self.values = self.keys[slot_N], self.values[slot_N]

    def grow(self, rows: int) -> None:
        """Append `rows` empty slots."""
        self.keys, self.values = _grown(self.keys, rows), _grown(self.values, rows)

    def clear(self, slot: int) -> None:
        """Zero a slot: what is not finite would reach later rows through the masked part of a product."""
        self.keys[slot] = 0.0
        self.values[slot] = 0.0

    @property
    def arrays(self) -> list[mx.array]:
        """What must be computed with each step."""
        return [self.keys, self.values]


def _grown(x: mx.array, rows: int) -> mx.array:
    return mx.concatenate([x, mx.zeros((rows, *x.shape[1:]), x.dtype)], axis=0)
