"""The caches of all running rows, whatever kinds the model makes, moved as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from clotho.inference.cache_layout import AttentionLeaf, CacheLayout, PromptState, StateLeaf, set_state
from clotho.inference.kv_cache import ColumnCache, ColumnTrack
from clotho.inference.row_caches import Arrival
from clotho.inference.serving import serving


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
