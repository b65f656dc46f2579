"""The caches of all running rows, whatever kinds the model makes, moved as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from actors.compute.engine.attending_cache import AttendingCache
from actors.compute.engine.columns import ColumnCache, ColumnTrack
from actors.compute.engine.layout import AttentionLeaf, CacheLayout, PromptState, StateLeaf, set_state
from actors.compute.engine.shared_prompts import SharedPrompts

WORTH_SHARING = 128
"""Copies of prompt tokens that sharing must spare: below, a few more operations a layer cost more than they save."""


class BatchCache:
    """Caches of `rows` slots. `nested` is what the model is called with."""

    def __init__(self, layout: CacheLayout, rows: int) -> None:
        self.layout = layout
        self.rows = rows
        self.shared = SharedPrompts(rows)
        self.tracks: dict[int | None, ColumnTrack] = {}
        self.leaves: list[Any] = [self._make(leaf) for leaf in layout.leaves]
        self.nested = layout.nest(self.leaves)

    def _make(self, leaf: AttentionLeaf | StateLeaf) -> Any:
        if isinstance(leaf, StateLeaf):
            cache = ArraysCache(len(leaf.shapes))
            shapes = zip(leaf.shapes, leaf.dtypes, strict=True)
            set_state(cache, [mx.zeros((self.rows, *shape), dtype) for shape, dtype in shapes])
            return cache
        track = self.tracks.get(leaf.window)
        if track is None:
            shared = self.shared if leaf.window is None and self.layout.shares_prompts else None
            track = self.tracks[leaf.window] = ColumnTrack(leaf.window, self.layout.mask_axes, shared)
        (key_heads, key_size), (value_heads, value_size) = leaf.key_shape, leaf.value_shape
        keys = mx.zeros((self.rows, key_heads, 0, key_size), leaf.dtype)
        values = mx.zeros((self.rows, value_heads, 0, value_size), leaf.dtype)
        return AttendingCache(track, keys, values) if self.layout.attends else ColumnCache(track, keys, values)

    def worth_sharing(self, rows: int, tokens: int) -> bool:
        """Say whether so many rows hold a prompt of so many tokens in common."""
        return self.layout.shares_prompts and (rows - 1) * tokens >= WORTH_SHARING

    def has_room(self, incoming: Incoming) -> bool:
        """Say whether prompts fit before the current column as it is."""
        return all(t.capacity and t.visible(incoming.columns(t)) <= t.column for t in self.tracks.values())

    def make_room(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], incoming: Incoming) -> None:
        """See to it that prompts fit before the current column, beside live rows of `positions_B` tokens."""
        for track in self.tracks.values():
            needed, longest = track.visible(incoming.columns(track)), track.longest(positions_B, live_B)
            if needed > track.column or not track.capacity:
                track.place(longest, max(needed, track.visible(longest)))

    def write(self, slots: Sequence[int], state: PromptState | None) -> None:
        """Put a computed prompt into slots, a copy for each; None is the state before the first token."""
        self.shared.leave(slots)
        for run in _runs(slots):
            self._write(run, state, shared=False)

    def share(self, slots: Sequence[int], state: PromptState, tokens: int) -> None:
        """Put a computed prompt of `tokens` tokens into slots, one for all of them where layers can share it."""
        place = self.shared.enter(slots, tokens)
        for leaf, arrays in zip(self.leaves, state, strict=True):
            if isinstance(leaf, AttendingCache) and leaf.track.shared is not None:
                leaf.write_prompt(place, *arrays)
        for run in _runs(slots):
            self._write(run, state, shared=True)

    def _write(self, slots: slice, state: PromptState | None, *, shared: bool) -> None:
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, ColumnCache):
                if state is not None and not (shared and leaf.track.shared is not None):
                    leaf.write(slots, *state[i])
            else:
                for e, array in enumerate(leaf.cache):
                    array[slots] = state[i][e] if state is not None else 0.0

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens; give back columns that none needs."""
        index_N = mx.array(np.asarray(slots, dtype=np.int32))
        kept_F = mx.array(self.shared.take(slots))
        for leaf in self.leaves:
            if isinstance(leaf, ColumnCache):
                leaf.take(index_N)
            else:
                leaf.filter(index_N)
            if isinstance(leaf, AttendingCache) and leaf.track.shared is not None:
                leaf.take_prompts(kept_F)
        self.rows = len(slots)
        for track in self.tracks.values():
            longest = track.longest(positions_N, np.ones(self.rows, dtype=np.bool_))
            track.place(longest, track.visible(longest))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        self.shared.grow(rows)
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

    def undo(self) -> Callable[[], None]:
        """Return what takes back the steps begun from here on, as long as they have not been computed."""
        undone = [leaf.undo() if isinstance(leaf, ColumnCache) else _undo_state(leaf) for leaf in self.leaves]
        undone += [track.undo() for track in self.tracks.values()]

        def take_back() -> None:
            for each in undone:
                each()

        return take_back

    @property
    def arrays(self) -> list[mx.array]:
        """Everything that a step writes; to be computed with it, so that no unevaluated history piles up."""
        return [a for leaf in self.leaves for a in (leaf.arrays if isinstance(leaf, ColumnCache) else leaf.cache)]

    @property
    def tokens(self) -> int:
        """Tokens that the largest buffers have room for, shared prompts included."""
        columns = self.rows * max((track.capacity for track in self.tracks.values()), default=0)
        return columns + int(self.shared.length_F.sum())


class Incoming(NamedTuple):
    """Prompts about to join: tokens of the longest, and of the longest that rows do not share."""

    longest: int
    longest_alone: int

    def columns(self, track: ColumnTrack) -> int:
        """Tokens that must find room in the columns of `track`."""
        return self.longest if track.shared is None else self.longest_alone


def _undo_state(cache: Any) -> Callable[[], None]:
    held = list(cache.cache)
    return lambda: set_state(cache, held)


def _runs(slots: Sequence[int]) -> list[slice]:
    """Split increasing slots into runs of neighbours."""
    runs: list[slice] = []
    for slot in slots:
        if runs and runs[-1].stop == slot:
            runs[-1] = slice(runs[-1].start, slot + 1)
        else:
            runs.append(slice(slot, slot + 1))
    return runs
