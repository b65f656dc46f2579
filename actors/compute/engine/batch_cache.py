"""The caches of all running rows, whatever kinds the model makes, moved as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from actors.compute.engine.columns import ColumnCache, ColumnTrack
from actors.compute.engine.layout import AttentionLeaf, CacheLayout, PromptState, StateLeaf, set_state


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
        return ColumnCache(track, keys, mx.zeros((self.rows, value_heads, 0, value_size), leaf.dtype))

    def has_room(self, incoming: int) -> bool:
        """Say whether a prompt of `incoming` tokens fits before the current column as it is."""
        return all(t.capacity and t.visible(incoming) <= t.column for t in self.tracks.values())

    def make_room(self, longest: int, incoming: int) -> None:
        """See to it that a prompt of `incoming` tokens fits before the current column; rows have up to `longest`."""
        for track in self.tracks.values():
            needed = track.visible(incoming)
            if needed > track.column or not track.capacity:
                track.place(longest, max(needed, track.visible(longest)))

    def write(self, slots: slice, state: PromptState | None) -> None:
        """Put a computed prompt into consecutive slots; None is the state before the first token."""
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, ColumnCache):
                if state is not None:
                    leaf.write(slots, *state[i])
            else:
                for e, array in enumerate(leaf.cache):
                    array[slots] = state[i][e] if state is not None else 0.0

    def take(self, slots: Sequence[int], longest: int) -> None:
        """Keep only these slots, in this order, and give back columns that no row of up to `longest` tokens needs."""
        index_N = mx.array(np.asarray(slots, dtype=np.int32))
        for leaf in self.leaves:
            if isinstance(leaf, ColumnCache):
                leaf.take(index_N)
            else:
                leaf.filter(index_N)
        self.rows = len(slots)
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

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> None:
        """Prepare a step in which every row adds one token after the `positions_B` it has."""
        offset_B = mx.array(positions_B)
        for track in self.tracks.values():
            track.begin(positions_B, live_B, offset_B)

    def end(self) -> None:
        """Finish the step."""
        for track in self.tracks.values():
            track.end()

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that a step writes; to be computed with it, so that no unevaluated history piles up."""
        return [a for leaf in self.leaves for a in (leaf.arrays if isinstance(leaf, ColumnCache) else leaf.cache)]

    @property
    def columns(self) -> int:
        """Columns of the longest buffer."""
        return max((track.capacity for track in self.tracks.values()), default=0)
