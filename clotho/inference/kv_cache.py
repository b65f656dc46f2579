"""The key-value cache of a batch whose rows differ in length and come and go.

Attention does not care about the order of keys once positions are rotated into them, so a row's keys may stand
anywhere. Here they stand right-aligned: every row writes its next key into the same column, one slice for the whole
batch, and the tokens of a row that has n of them are the n columns before it. A row joins by copying its prompt's
keys to the left of the current column; nothing is ever realigned. When the columns run out, the visible ones move to
the front of a new buffer, once in many steps. A sliding window is the same with fewer visible columns.

The caches of all running rows, whatever kinds the model makes, moved as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from clotho.inference.cache_layout import (
    Arrival,
    AttentionLeaf,
    CacheLayout,
    PromptState,
    StateLeaf,
    serving,
    set_state,
)


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


class BatchCache:
    """Caches of `rows` slots. `nested` is what the model is called with."""

    def __init__(self, layout: CacheLayout, rows: int) -> None:
        self.layout = layout
        self.rows = rows
        self.tracks: dict[int | None, ColumnTrack] = {}
        self.leaves: list[Any] = [self._make(leaf) for leaf in layout.leaves]
        self.nested = layout.nest(self.leaves)

    def _make(self, leaf: AttentionLeaf | StateLeaf) -> Any:
        if isinstance(leaf, StateLeaf):
            cache = ArraysCache(len(leaf.shapes))
            shapes = zip(leaf.shapes, leaf.dtypes, strict=True)
            set_state(cache, [mx.zeros((self.rows, *shape), dtype) for shape, dtype in shapes])
            return cache
        track = self.tracks.setdefault(leaf.window, ColumnTrack(leaf.window, self.layout.mask_axes))
        (key_heads, key_size), (value_heads, value_size) = leaf.key_shape, leaf.value_shape
        keys = mx.zeros((self.rows, key_heads, 0, key_size), leaf.dtype)
        values = mx.zeros((self.rows, value_heads, 0, value_size), leaf.dtype)
        return ColumnCache(track, keys, values)

    def has_room(self, arrivals: Sequence[Arrival]) -> bool:
        """Say whether prompts fit before the current column as it is."""
        incoming = max(arrival.tokens for arrival in arrivals)
        return all(track.capacity and track.visible(incoming) <= track.column for track in self.tracks.values())

    def make_room(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], arrivals: Sequence[Arrival]) -> None:
        """See to it that prompts fit before the current column, beside live rows of `positions_B` tokens."""
        incoming, longest = max(arrival.tokens for arrival in arrivals), int(positions_B.max(initial=0, where=live_B))
        for track in self.tracks.values():
            needed = track.visible(incoming)
            if needed > track.column or not track.capacity:
                track.place(longest, max(needed, track.visible(longest)))

    def enter(self, slots: Sequence[int], arrival: Arrival) -> None:
        """Put a computed prompt into slots, a copy for each."""
        for run in _runs(slots):
            self._write(run, arrival.state)

    def _write(self, slots: slice, state: PromptState | None) -> None:
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, ColumnCache):
                if state is not None:
                    leaf.write(slots, *state[i])
            else:
                for e, array in enumerate(leaf.cache):
                    array[slots] = state[i][e] if state is not None else 0.0

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens; give back columns that none needs."""
        index_N = mx.array(np.asarray(slots, dtype=np.int32))
        for leaf in self.leaves:
            if isinstance(leaf, ColumnCache):
                leaf.take(index_N)
            else:
                leaf.filter(index_N)
        self.rows = len(slots)
        longest = int(positions_N.max(initial=0))
        for track in self.tracks.values():
            track.place(longest, track.visible(longest))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        for leaf in self.leaves:
            if isinstance(leaf, ColumnCache):
                leaf.grow(rows)
            else:
                leaf.cache = [mx.concatenate([a, mx.zeros((rows, *a.shape[1:]), a.dtype)]) for a in leaf.cache]
        self.rows += rows

    def clear(self, slot: int) -> None:
        """Zero one slot."""
        for leaf in self.leaves:
            if isinstance(leaf, ColumnCache):
                leaf.clear(slot)
            else:
                for array in leaf.cache:
                    array[slot] = 0.0

    def logits(
        self, token_B: mx.array | NDArray[np.int32], positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]
    ) -> mx.array:
        """Let the model read one token for every row; nothing is computed yet."""
        self.begin(positions_B, due_B)
        with serving(self.layout.model):
            logits_B_V: mx.array = self.layout.model(mx.array(token_B)[:, None], cache=self.nested)[:, -1]
        for track in self.tracks.values():
            track.end()
        return logits_B_V

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> None:
        """Prepare a step in which every row adds one token after the `positions_B` it has."""
        offset_B = mx.array(positions_B)
        for track in self.tracks.values():
            track.begin(positions_B, live_B, offset_B)

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that a step writes; to be computed with it, so that no unevaluated history piles up."""
        return [a for leaf in self.leaves for a in (leaf.arrays if isinstance(leaf, ColumnCache) else leaf.cache)]

    @property
    def tokens(self) -> int:
        """Tokens that the largest buffers have room for."""
        return self.rows * max((track.capacity for track in self.tracks.values()), default=0)


def _runs(slots: Sequence[int]) -> list[slice]:
    """Split increasing slots into runs of neighbours."""
    runs: list[slice] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = slice(runs[-1].start, slot + 1)
        else:
            runs.append(slice(slot, slot + 1))
    return runs
