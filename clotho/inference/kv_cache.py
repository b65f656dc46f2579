"""The KV cache of a batch whose rows differ in length, join and leave.

Terms: a column is one token position of the shared buffers (rows, heads, columns, size). Rows are right-aligned: every
row writes its next key into the same column, one slice for the whole batch, and a row of n tokens occupies the n
columns before it. Attention does not depend on the order of keys once positions are rotated into them, so columns
need not equal positions. A row joins by copying its prompt to the left of the current column; nothing is realigned.
When the columns run out, the visible ones are copied to the front of a larger buffer. A sliding window sees fewer
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from clotho.cpu.interface import PrefilledPrompt, PromptState, spare_columns
from clotho.inference.cache_layout import AttentionLeaf, CacheLayout, StateLeaf, evaluation_mode, set_state
from protocols.errors import ModelError


class ColumnState:
    """The columns of all layers with the same attention window.

    window: maximum number of tokens that a layer attends to, the newest included; None = all.
    column: index of the next column to write. capacity: number of columns of the buffers.
    """

    def __init__(self, window: int | None, mask_axes: int = 4) -> None:
        self.window = window
        self._mask_axes = mask_axes
        self.capacity = 0
        self.column = 0
        self.caches: list[LayerKVCache] = []
        self.first = 0
        self.offset_B = mx.array([0])
        self._positions_B: NDArray[np.int32] = np.zeros(1, dtype=np.int32)
        self._uniform = True
        self._masks: dict[int | None, mx.array | None] = {}

    def visible(self, tokens: int) -> int:
        """Return how many of a row's `tokens` a layer attends to."""
        return tokens if self.window is None else min(tokens, self.window)

    def move(self, longest: int, column: int) -> None:
        """Move the visible columns of rows with up to `longest` tokens so that they end before `column`."""
        kept = min(self.visible(longest), self.column)
        capacity = column + spare_columns(column)
        for cache in self.caches:
            cache.keys = _moved(cache.keys, self.column - kept, self.column, column, capacity)
            cache.values = _moved(cache.values, self.column - kept, self.column, column, capacity)
        self.column, self.capacity = column, capacity

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], offset_B: mx.array) -> None:
        """Prepare a step that appends one token to every row, which has `positions_B` tokens."""
        longest = int(positions_B[live_B].max())
        if self.column >= self.capacity:
            self.move(longest, self.visible(longest))
        self.first = self.column + 1 - self.visible(longest + 1)
        self.offset_B = offset_B
        self._positions_B = positions_B
        self._uniform = bool((positions_B[live_B] >= self.visible(longest + 1) - 1).all())
        self._masks = {}

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | None:
        """Return which visible columns each row attends to, (B, 1, 1, columns); None = all.

        window: a narrower window than this state's hides older columns. The mask has one more axis for models that add
        it to scores in groups of heads.
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
        """Finish the step: the current column is written."""
        self.column += 1


def _moved(x: mx.array, start: int, stop: int, column: int, capacity: int) -> mx.array:
    rows, heads, _, size = x.shape
    left = mx.zeros((rows, heads, column - (stop - start), size), x.dtype)
    right = mx.zeros((rows, heads, capacity - column, size), x.dtype)
    return mx.concatenate([left, x[:, :, start:stop], right], axis=2)


class LayerKVCache:
    """The KV cache of one attention layer, with the interface that mlx-lm's models use while decoding."""

    def __init__(self, columns: ColumnState, keys: mx.array, values: mx.array) -> None:
        self.columns = columns
        self.keys = keys
        self.values = values
        columns.caches.append(self)

    @property
    def offset(self) -> mx.array:
        """Number of tokens of each row, (B,)."""
        return self.columns.offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the newest token of every row and return all visible columns, (B, heads, columns, size)."""
        column = self.columns.column
        self.keys[:, :, column : column + 1] = keys
        self.values[:, :, column : column + 1] = values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the visible columns. Some models share them between layers."""
        first, last = self.columns.first, self.columns.column + 1
        return self.keys[:, :, first:last], self.values[:, :, first:last]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one decode step. Name and arguments are mlx-lm's."""
        if N != 1:
            raise ValueError(f"a decode cache takes one token at a time, not {N}")
        return self.columns.mask(window_size, as_array=return_array)

    def write(self, slots: slice, keys: mx.array, values: mx.array) -> None:
        """Store the keys and values of a prompt, (1, heads, tokens, size), to the left of the current column."""
        column, tokens = self.columns.column, keys.shape[2]
        self.keys[slots, :, column - tokens : column] = keys
        self.values[slots, :, column - tokens : column] = values

    def take(self, slot_N: mx.array) -> None:
        """Keep only the rows of these slots, in this order."""
        self.keys, self.values = self.keys[slot_N], self.values[slot_N]

    def grow(self, rows: int) -> None:
        """Append `rows` empty slots."""
        self.keys, self.values = _grown(self.keys, rows), _grown(self.values, rows)

    def clear(self, slot: int) -> None:
        """Zero a slot. NaN or inf in masked positions would spread, since 0 * NaN = NaN."""
        self.keys[slot] = 0.0
        self.values[slot] = 0.0

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated with each step."""
        return [self.keys, self.values]


def _grown(x: mx.array, rows: int) -> mx.array:
    return mx.concatenate([x, mx.zeros((rows, *x.shape[1:]), x.dtype)], axis=0)


class BatchKVCache:
    """KV caches of `rows` slots in MLX. nested: the caches in the structure that the model expects."""

    def __init__(self, layout: CacheLayout, rows: int) -> None:
        self.layout = layout
        self.rows = rows
        self.columns: dict[int | None, ColumnState] = {}
        self.leaves: list[Any] = [self._make(leaf) for leaf in layout.leaves]
        self.nested = layout.nest(self.leaves)

    def _make(self, leaf: AttentionLeaf | StateLeaf) -> Any:
        if isinstance(leaf, StateLeaf):
            cache = ArraysCache(len(leaf.shapes))
            shapes = zip(leaf.shapes, leaf.dtypes, strict=True)
            set_state(cache, [mx.zeros((self.rows, *shape), dtype) for shape, dtype in shapes])
            return cache
        columns = self.columns.setdefault(leaf.window, ColumnState(leaf.window, self.layout.mask_axes))
        (key_heads, key_size), (value_heads, value_size) = leaf.key_shape, leaf.value_shape
        keys = mx.zeros((self.rows, key_heads, 0, key_size), leaf.dtype)
        values = mx.zeros((self.rows, value_heads, 0, value_size), leaf.dtype)
        return LayerKVCache(columns, keys, values)

    def has_room(self, prompts: Sequence[PrefilledPrompt]) -> bool:
        """Whether the prompts fit to the left of the current column."""
        incoming = max(prompt.tokens for prompt in prompts)
        return all(state.capacity and state.visible(incoming) <= state.column for state in self.columns.values())

    def make_room(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], prompts: Sequence[PrefilledPrompt]
    ) -> None:
        """Move columns so that the prompts fit to the left of the current one. Live rows have `positions_B` tokens."""
        incoming, longest = max(prompt.tokens for prompt in prompts), int(positions_B.max(initial=0, where=live_B))
        for columns in self.columns.values():
            needed = columns.visible(incoming)
            if needed > columns.column or not columns.capacity:
                columns.move(longest, max(needed, columns.visible(longest)))

    def enter(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Store a copy of a prompt in each of the slots."""
        for run in _runs(slots):
            self._write(run, prompt.state)

    def _write(self, slots: slice, state: PromptState | None) -> None:
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, LayerKVCache):
                if state is not None:
                    leaf.write(slots, *state[i])
            else:
                for e, array in enumerate(leaf.cache):
                    array[slots] = state[i][e] if state is not None else 0.0

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens, and free unused columns."""
        index_N = mx.array(np.asarray(slots, dtype=np.int32))
        for leaf in self.leaves:
            if isinstance(leaf, LayerKVCache):
                leaf.take(index_N)
            else:
                leaf.filter(index_N)
        self.rows = len(slots)
        longest = int(positions_N.max(initial=0))
        for columns in self.columns.values():
            columns.move(longest, columns.visible(longest))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        for leaf in self.leaves:
            if isinstance(leaf, LayerKVCache):
                leaf.grow(rows)
            else:
                leaf.cache = [mx.concatenate([a, mx.zeros((rows, *a.shape[1:]), a.dtype)]) for a in leaf.cache]
        self.rows += rows

    def clear(self, slot: int) -> None:
        """Zero one slot."""
        for leaf in self.leaves:
            if isinstance(leaf, LayerKVCache):
                leaf.clear(slot)
            else:
                for array in leaf.cache:
                    array[slot] = 0.0

    def logits(
        self, token_B: mx.array | NDArray[np.int32], positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]
    ) -> mx.array:
        """Append one token to every row; return the logits, (B, V), not yet evaluated."""
        self.begin(positions_B, due_B)
        with evaluation_mode(self.layout.model):
            logits_B_V: mx.array = self.layout.model(mx.array(token_B)[:, None], cache=self.nested)[:, -1]
        for columns in self.columns.values():
            columns.end()
        return logits_B_V

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> None:
        """Prepare a step that appends one token to every row, which has `positions_B` tokens."""
        offset_B = mx.array(positions_B)
        for columns in self.columns.values():
            columns.begin(positions_B, live_B, offset_B)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a step writes. Evaluating them with each step keeps the graph from growing."""
        return [a for leaf in self.leaves for a in (leaf.arrays if isinstance(leaf, LayerKVCache) else leaf.cache)]

    @property
    def tokens(self) -> int:
        """Number of tokens that the largest buffers hold."""
        return self.rows * max((state.capacity for state in self.columns.values()), default=0)


def _runs(slots: Sequence[int]) -> list[slice]:
    """Split increasing slots into runs of consecutive slots."""
    runs: list[slice] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = slice(runs[-1].start, slot + 1)
        else:
            runs.append(slice(slot, slot + 1))
    return runs


MASK_AXES = (4, 5)
"""Axes of attention masks: (B, heads, queries, keys), or with heads split into groups."""


def probe_batching(layout: CacheLayout) -> None:
    """Find out whether the model decodes rows of different lengths in one step, and set the layout's mask axes.

    The step is built but not evaluated. Raises ModelError if the model cannot decode it.
    """
    heads = max((leaf.key_shape[0] for leaf in layout.leaves if isinstance(leaf, AttentionLeaf)), default=1)
    reason: Exception | None = None
    for layout.mask_axes in MASK_AXES:
        try:
            shape = _step_shape(layout, rows=heads + 1)  # with as many rows as heads, a wrong axis would go unnoticed
        except ValueError as error:
            reason = error
            continue
        if shape[:2] == (heads + 1, 1):
            return
    raise ModelError(f"this model cannot decode several sequences at once: {reason}")


def _step_shape(layout: CacheLayout, rows: int) -> tuple[int, ...]:
    cache = BatchKVCache(layout, rows)
    positions_B, live_B = np.arange(rows, dtype=np.int32) % 3, np.ones(rows, dtype=np.bool_)
    cache.make_room(positions_B, live_B, [PrefilledPrompt(rows=1, tokens=2, state=None)])
    cache.begin(positions_B, live_B)
    logits: mx.array = layout.model(mx.zeros((rows, 1), dtype=mx.int32), cache=cache.nested)
    return tuple(logits.shape)
