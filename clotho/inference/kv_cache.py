"""The KV cache of a batch whose rows differ in length, join and leave.

Terms: a column is one token position of the shared buffers (rows, heads, columns, size). Rows are right-aligned: every
row writes its next key into the same column, one slice for the whole batch, and a row of n tokens occupies the n
columns before it. Attention does not depend on the order of keys once positions are rotated into them, so columns
need not equal positions. A row joins by copying its prompt to the left of the current column; nothing is realigned.
Buffers are allocated for the tokens that the rows can still sample. When the columns run out, because rows joined
later, the visible ones are copied to the front of a new buffer. A sliding window sees fewer columns.

Prompts of several rows can be stored once instead (`clotho.inference.shared_prompts`), in layers that attend to all
tokens; the tokens of a shared prompt are in no column.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from numpy.typing import NDArray

from clotho.inference.cache_layout import AttentionLeaf, CacheLayout, StateLeaf, evaluation_mode, set_state
from clotho.inference.kv_format import PLAIN, Held, KVFormat, each
from clotho.inference.row_runs import RowRun, even_runs, longest_first, min_saved_scores, wasted
from clotho.inference.rows import PrefilledPrompt, PromptState, RouteArray, rounded_columns, spare_columns
from clotho.inference.shared_prompts import PromptArrays, SharedPrompts, grouped_attention
from clotho.models.attention import install_cache_attention
from clotho.models.stages import recorded_stages


class Ahead(NamedTuple):
    """Limits of the columns to allocate ahead: tokens that a row can still sample, and columns of the KV cache."""

    steps: int
    columns: int


class ColumnState:
    """The columns of all layers with the same attention window.

    window: maximum number of tokens that a layer attends to, the newest included; None = all. prompts: shared prompts
    of these layers; None = every row has a copy of its prompt. limit: maximum number of columns to allocate for tokens
    that rows can still sample. column: index of the next column to write. capacity: number of columns of the buffers.
    runs: the rows of the present step, divided by length; with a window, or for a verification, one run. min_saved: see
    `even_runs`. width: number of tokens per row of the present step.
    """

    width = 1

    def __init__(self, layout: CacheLayout, window: int | None) -> None:
        self.window = window
        self.prompts: SharedPrompts | None = None
        self._layout = layout
        self.min_saved = min_saved_scores(layout.held_bytes) if window is None else sys.maxsize
        self.capacity = 0
        self.column = 0
        self.caches = WeakSet[LayerKVCache]()  # in a cycle, buffers would stay until the next garbage collection
        self.first = 0
        self.runs: list[RowRun] = []
        self.offset_B = mx.array([0])
        self._held_B: NDArray[np.int32] = np.zeros(1, dtype=np.int32)
        self._uniform = True
        self._masks: dict[int | None, mx.array | None] = {}
        self._biases: dict[mx.Dtype, mx.array] = {}
        self._run_masks: dict[int, tuple[mx.array, list[mx.array]]] = {}

    def visible(self, tokens: int) -> int:
        """Return how many of a row's `tokens` a layer attends to."""
        return tokens if self.window is None else min(tokens, self.window)

    def held(self, positions_B: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many of the `positions_B` tokens of each row are in columns."""
        if self.prompts is None:
            return positions_B
        held_B: NDArray[np.int32] = np.maximum(positions_B - self.prompts.tokens_B, 0)
        return held_B

    @property
    def attends_plainly(self) -> bool:
        """Whether attention reads the visible columns of its own layer, and nothing else."""
        return self._layout.query_heads is not None

    def move(self, longest: int, column: int, ahead: Ahead, slots: Sequence[int] | None = None) -> None:
        """Move the visible columns of rows of up to `longest` tokens before `column`. slots: kept rows; None: all."""
        kept = min(self.visible(longest), self.column)
        capacity = column + self._ahead(column, ahead)
        index_N = None if slots is None else mx.array(np.asarray(slots, dtype=np.int32))
        for cache in self.caches:
            cache.change(partial(_moved, (self.column - kept, self.column), column, capacity, index_N))
        self.column, self.capacity = column, capacity

    def drop_beyond(self, columns: int) -> None:
        """Drop the columns after this number that are not written yet. Layers with a window have few."""
        capacity = max(self.column, columns)
        if self.window is not None or capacity >= self.capacity:
            return
        for cache in self.caches:
            cache.change(lambda x: x[:, :, :capacity])
        self.capacity = capacity

    def _ahead(self, column: int, ahead: Ahead) -> int:
        """Return how many columns to allocate behind `column`: for all tokens that rows can still sample, if allowed.

        The buffer then has one of few sizes (`rounded_columns`). With a window, few columns: a copy of the window costs
        less than columns that no row sees.
        """
        least = spare_columns(column)
        if self.window is not None:
            return least
        allowed = ahead.columns - column
        wanted = max(1, min(ahead.steps, max(least, allowed)))
        return max(wanted, min(rounded_columns(column + wanted) - column, allowed))

    def begin(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], offset_B: mx.array, ahead: Ahead
    ) -> None:
        """Prepare a step that appends one token to every row, which has `positions_B` tokens."""
        held_B = self.held(positions_B)
        longest = int(held_B[live_B].max())
        if self.column >= self.capacity:
            self.move(longest, self.visible(longest), ahead)
        self.first = self.column + 1 - self.visible(longest + 1)
        self.offset_B = offset_B
        self._held_B = held_B
        self._uniform = bool((held_B[live_B] >= self.visible(longest + 1) - 1).all())
        self._masks, self._biases, self._run_masks = {}, {}, {}
        self.runs = even_runs(np.minimum(held_B + 1, self.visible(longest + 1)), self.min_saved)
        if self.prompts is not None:
            self.prompts.begin(live_B)

    def mask(self, window: int | None, *, as_array: bool) -> mx.array | None:
        """Return which visible columns each row attends to, (B, 1, 1, columns); None = all.

        window: a narrower window than this state's hides older columns. If the number of query heads is known, the mask
        has an axis of this length, and is contiguous: otherwise, Metal copies it in every layer. The mask has one more
        axis for models that add it to scores in groups of heads.
        """
        extent = self.column + 1 - self.first
        narrow = window is not None and window < extent
        unused = self.prompts is not None  # `LayerKVCache.attend` uses `bias`
        if (self._uniform or unused) and not narrow and not as_array:
            return None
        key = window if narrow else None
        if key not in self._masks:
            self._masks[key] = self._new_mask(extent, key)
        return self._masks[key]

    def masks_by_run(self, mask: mx.array | None) -> Sequence[mx.array | None]:
        """Return the parts of a mask of this step that concern each run; the same arrays in every layer."""
        if mask is not None and id(mask) not in self._run_masks:
            parts = [mx.contiguous(mask[run.rows, ..., mask.shape[-1] - run.columns :]) for run in self.runs]
            self._run_masks[id(mask)] = mask, parts
        return [None] * len(self.runs) if mask is None else self._run_masks[id(mask)][1]

    def _new_mask(self, extent: int, window: int | None) -> mx.array:
        age_C = mx.arange(extent - 1, -1, -1)
        mask_B_C = age_C[None] <= mx.array(self._held_B)[:, None]
        if window is not None:
            mask_B_C = mask_B_C & (age_C[None] < window)
        rows, heads = mask_B_C.shape[0], self._layout.query_heads
        if heads is None:
            return mask_B_C.reshape(rows, *[1] * (self._layout.mask_axes - 2), extent)
        return mx.contiguous(mx.broadcast_to(mask_B_C[:, None, None], (rows, heads, 1, extent)))

    def bias(self, dtype: mx.Dtype) -> mx.array:
        """Return what to add to the scores of own columns: minus infinity for columns before the first of a row."""
        if dtype not in self._biases:
            extent = self.column + 1 - self.first
            if self._uniform:
                self._biases[dtype] = mx.zeros(1, dtype)
            else:
                hidden_B_C = np.arange(extent - 1, -1, -1) > self._held_B[:, None]
                bias_B_C = np.where(hidden_B_C, np.float32(-np.inf), np.float32(0.0))
                self._biases[dtype] = mx.array(bias_B_C[:, None, None, None]).astype(dtype)
        return self._biases[dtype]

    def end(self) -> None:
        """Finish the step: the current column is written."""
        self.column += 1

    def own(self, slot: int, tokens: int) -> slice:
        """Return the columns of a row of which `tokens` are in columns."""
        return slice(self.column - self.visible(tokens), self.column)


def _moved(held: tuple[int, int], column: int, capacity: int, index_N: mx.array | None, x: mx.array) -> mx.array:
    start, stop = held
    kept = x[:, :, start:stop] if index_N is None else x[:, :, start:stop][index_N]
    rows, heads, _, size = kept.shape
    left = mx.zeros((rows, heads, column - (stop - start), size), x.dtype)
    right = mx.zeros((rows, heads, capacity - column, size), x.dtype)
    return mx.concatenate([left, kept, right], axis=2)


class LayerKVCache:
    """The KV cache of one attention layer, with the interface that mlx-lm's models use. keys, values: as held."""

    def __init__(self, columns: ColumnState, leaf: AttentionLeaf, rows: int) -> None:
        self.columns = columns
        self.prompts: PromptArrays | None = None
        self.format = leaf.format
        self._leaf = leaf
        self.keys = leaf.format.empty(rows, *leaf.key_shape, leaf.dtype)
        self.values = leaf.format.empty(rows, *leaf.value_shape, leaf.dtype)
        columns.caches.add(self)

    def change(self, change: Callable[[mx.array], mx.array]) -> None:
        """Replace the arrays of keys and of values; `change` moves rows and columns."""
        self.keys, self.values = each(change, self.keys), each(change, self.values)

    def share(self, prompts: SharedPrompts | None) -> None:
        """Hold shared prompts from now on, or none."""
        self.prompts = None if prompts is None else PromptArrays(self._leaf)
        if prompts is not None and self.prompts is not None:
            prompts.layers.append(self.prompts)

    @property
    def offset(self) -> mx.array:
        """Number of tokens of each row, (B,)."""
        return self.columns.offset_B

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the newest token of every row and return all visible columns, (B, heads, columns, size)."""
        column = self.columns.column
        self._put(slice(None), slice(column, column + 1), keys, values)
        return self.keys_and_values()

    def _put(self, rows: slice, columns: slice, keys: mx.array, values: mx.array) -> None:
        for held, new in ((self.keys, keys), (self.values, values)):
            for array, part in zip(held, self.format.packed(new), strict=True):
                array[rows, :, columns] = part

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the visible columns, expanded, which some models share between layers."""
        keys, values = self.visible()
        return self.format.unpacked(keys), self.format.unpacked(values)

    def visible(self) -> tuple[Held, Held]:
        """Return the visible columns as they are held."""
        seen = slice(self.columns.first, self.columns.column + self.columns.width)
        return tuple(a[:, :, seen] for a in self.keys), tuple(a[:, :, seen] for a in self.values)

    @property
    def _reads_held(self) -> bool:
        """Whether attention reads packed columns as they are held."""
        return self.format.is_packed and self.columns.attends_plainly

    def own(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        """Return what attention reads of the visible columns; keys, values: result of `keys_and_values`."""
        return self.visible() if self._reads_held else ((keys,), (values,))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Return the mask of one decode step. Name and arguments are mlx-lm's."""
        if N != 1:
            raise ValueError(f"a decode cache takes one token at a time, not {N}")
        return self.columns.mask(window_size, as_array=return_array)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | None
    ) -> mx.array | None:
        """Compute attention over shared prompts and own columns, by run; None if mlx-lm should do it.

        With shared prompts, the mask is not used: `ColumnState.bias` and the prompts' lengths replace it.
        """
        shared, runs, own = self.columns.prompts, self.columns.runs, self.own(keys, values)
        if shared is None or self.prompts is None:
            form = self.format if self._reads_held else PLAIN
            if len(runs) == 1:
                return form.attend(queries, *own, scale=scale, mask=mask) if form.is_packed else None
            return self._attend_by_run(form, queries, own, scale, mask)
        key_heads = keys.shape[1]
        indices = shared.indices(key_heads, queries.shape[1] // key_heads, queries.dtype)
        bias_B_C = self.columns.bias(queries.dtype)
        return grouped_attention(queries, own, self.prompts, indices, bias_B_C, scale, runs)

    def _attend_by_run(
        self, form: KVFormat, queries: mx.array, own: tuple[Held, Held], scale: float, mask: mx.array | None
    ) -> mx.array:
        parts, extent = [], own[0][0].shape[2]
        for (rows, columns), part_mask in zip(self.columns.runs, self.columns.masks_by_run(mask), strict=True):
            keys, values = (tuple(a[rows, :, extent - columns :] for a in held) for held in own)
            parts.append(form.attend(queries[rows], keys, values, scale=scale, mask=part_mask))
        return mx.concatenate(parts, axis=0)

    def write(self, slots: slice, keys: mx.array, values: mx.array) -> None:
        """Store the keys and values of a prompt, (1, heads, tokens, size), to the left of the current column."""
        column, tokens = self.columns.column, keys.shape[2]
        self._put(slots, slice(column - tokens, column), keys, values)

    def read(self, slot: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values of a row of `tokens` tokens, (1, heads, tokens, size), with a shared prompt."""
        shared, arrays = self.columns.prompts, self.prompts
        prompt = int(shared.tokens_B[slot]) if shared is not None else 0
        row, columns = slice(slot, slot + 1), self.columns.own(slot, tokens - prompt)
        keys, values = (
            self.format.unpacked(tuple(a[row, :, columns] for a in held)) for held in (self.keys, self.values)
        )
        if shared is None or arrays is None or not prompt:
            return keys, values
        before = arrays.read(int(shared.prompt_B[slot]), prompt)
        return mx.concatenate([before[0], keys], axis=2), mx.concatenate([before[1], values], axis=2)

    def grow(self, rows: int) -> None:
        """Append `rows` empty slots."""
        self.change(partial(_grown, rows))

    def clear(self, slot: int) -> None:
        """Zero a slot. NaN or inf in masked positions would spread, since 0 * NaN = NaN."""
        for array in (*self.keys, *self.values):
            array[slot] = 0

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays that must be evaluated with each step."""
        return [*self.keys, *self.values]


def _grown(rows: int, x: mx.array) -> mx.array:
    return mx.concatenate([x, mx.zeros((rows, *x.shape[1:]), x.dtype)], axis=0)


class BatchKVCache:
    """KV caches of `rows` slots in MLX. nested: as the model expects them. reserved_B: tokens reserved for each row."""

    columns_type = ColumnState

    def __init__(
        self, layout: CacheLayout, rows: int, limit: int, layer_type: type[LayerKVCache] = LayerKVCache
    ) -> None:
        """limit: maximum number of tokens of all rows, `engine.kv_cache_tokens`."""
        self.layout = layout
        self.rows = rows
        self.reserved_B = np.zeros(rows, dtype=np.int64)
        self.prompts: SharedPrompts | None = None
        self.columns: dict[int | None, ColumnState] = {}
        self.leaves: list[Any] = [self._make(leaf, layer_type) for leaf in layout.leaves]
        self.nested = layout.nest(self.leaves)
        self.limit = limit
        self._shares = self._divides = False

    def _make(self, leaf: AttentionLeaf | StateLeaf, layer_type: type[LayerKVCache]) -> Any:
        if isinstance(leaf, StateLeaf):
            cache = ArraysCache(len(leaf.shapes))
            shapes = zip(leaf.shapes, leaf.dtypes, strict=True)
            set_state(cache, [mx.zeros((self.rows, *shape), dtype) for shape, dtype in shapes])
            return cache
        columns = self.columns.setdefault(leaf.window, self.columns_type(self.layout, leaf.window))
        return layer_type(columns, leaf, self.rows)

    def has_room(self, prompts: Sequence[PrefilledPrompt]) -> bool:
        """Whether the prompts fit to the left of the current column."""
        shares = self._are_shared(prompts)
        return all(
            state.capacity and self._columns_needed(state, prompts, shares=shares) <= state.column
            for state in self.columns.values()
        )

    def make_room(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], prompts: Sequence[PrefilledPrompt]
    ) -> None:
        """Move columns so that the prompts fit to the left of the current one. Live rows have `positions_B` tokens."""
        self.reserved_B[~live_B] = 0
        if self.prompts is not None:
            self.prompts.remove(np.flatnonzero(~live_B).tolist())
            self._drop_unused_prompts()
        self._shares = self._are_shared(prompts)
        if self._shares:
            self._shared().reserve([prompt for prompt in prompts if _can_be_shared(prompt)])
        steps = max(prompt.reserved - prompt.tokens for prompt in prompts)
        ahead = self._ahead(positions_B, live_B, steps)
        for columns in self.columns.values():
            longest = int(columns.held(positions_B).max(initial=0, where=live_B))
            needed = self._columns_needed(columns, prompts, shares=self._shares)
            if needed > columns.column or not columns.capacity:
                columns.move(longest, max(needed, columns.visible(longest)), ahead)

    def _are_shared(self, prompts: Sequence[PrefilledPrompt]) -> bool:
        """Whether prompts are stored once: if it saves enough, and the limit allows all rows at their longest."""
        shared = [prompt for prompt in prompts if _can_be_shared(prompt)]
        saved = sum((prompt.rows - 1) * prompt.tokens for prompt in shared)
        if not shared or not self.layout.shares_prompts or not (self.prompts or self.layout.saves_enough(saved)):
            return False
        longest, number, own_B = max(prompt.tokens for prompt in shared), 1 + len(shared), self.reserved_B
        if self.prompts is not None:
            longest, number = max(longest, self.prompts.room), number + len(self.prompts.tokens_F)
            own_B = own_B - self.prompts.tokens_B
        joining = max(prompt.reserved - prompt.tokens * _can_be_shared(prompt) for prompt in prompts)
        return max(int(own_B.max(initial=0)), joining) * self.rows + longest * number <= self.limit

    def _shared(self) -> SharedPrompts:
        """Return the shared prompts, which are empty at first."""
        if self.prompts is None:
            install_cache_attention()
            self._share(SharedPrompts(self.rows))
        assert self.prompts is not None
        return self.prompts

    def _share(self, prompts: SharedPrompts | None) -> None:
        self.prompts = self.columns[None].prompts = prompts
        for cache in self.columns[None].caches:
            cache.share(prompts)

    def _drop_unused_prompts(self) -> None:
        if self.prompts is not None and not self.prompts.active:
            self._share(None)

    def _columns_needed(self, columns: ColumnState, prompts: Sequence[PrefilledPrompt], *, shares: bool) -> int:
        shares = shares and columns.prompts is not None
        tokens = (prompt.tokens for prompt in prompts if not (shares and _can_be_shared(prompt)))
        return columns.visible(max(tokens, default=0))

    def _ahead(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], steps: int = 0) -> Ahead:
        """steps: number of tokens that rows which join can sample."""
        left_B = self.reserved_B - positions_B
        outgrown_B = live_B & (left_B <= 0)
        more = spare_columns(int(positions_B.max(where=outgrown_B, initial=0))) if outgrown_B.any() else 0
        present = max(more, int(left_B.max(initial=0, where=live_B)))
        shared = self.prompts.tokens if self.prompts is not None else 0
        return Ahead(max(steps, present), (self.limit - shared) // max(1, self.rows))

    def enter(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Store a prompt for slots: one shared copy, if `make_room` found that it saves enough, or one copy per slot.

        Layers with a window and states other than keys and values have a copy per slot in any case.
        """
        self.reserved_B[list(slots)] = prompt.reserved
        shared, number = self.prompts, 0
        if shared is not None and self._shares and _can_be_shared(prompt):
            number = shared.add(slots, prompt.tokens)
        elif shared is not None:
            shared.remove(slots)
        for i, leaf in enumerate(self.leaves):
            state = prompt.state[i] if prompt.state is not None else None
            if number and state is not None and isinstance(leaf, LayerKVCache) and leaf.prompts is not None:
                leaf.prompts.write(number, *state)
            else:
                for run in _runs(slots):
                    _write(leaf, run, state)
        if shared is not None and number:
            shared.evaluate()

    def state(self, slot: int, tokens: int) -> PromptState:
        """Return an evaluated copy of the KV cache of a row of `tokens` tokens, as prefill returns it."""
        read = [leaf.read(slot, tokens) if isinstance(leaf, LayerKVCache) else leaf.cache for leaf in self.leaves]
        copied = tuple(
            tuple(
                mx.contiguous(array if isinstance(leaf, LayerKVCache) else array[slot : slot + 1]) for array in arrays
            )
            for leaf, arrays in zip(self.leaves, read, strict=True)
        )
        mx.eval(copied)
        return copied

    def routes(self, slot: int, tokens: int) -> RouteArray | None:
        """Return a copy of the routes of a row of `tokens` tokens; None for a model without experts."""
        layers = len(self.layout.mixtures.counts)
        return np.array(self.leaves[-1].read(slot, tokens)[0]).reshape(tokens, layers, -1) if layers else None

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens, and free unused columns."""
        self.rows = len(slots)
        self.reserved_B = self.reserved_B[list(slots)]
        if self.prompts is not None:
            self.prompts.take(slots)
            self._drop_unused_prompts()
        ahead = self._ahead(positions_N, np.ones(self.rows, dtype=np.bool_))
        for columns in self.columns.values():
            longest = int(columns.held(positions_N).max(initial=0))
            columns.move(longest, columns.visible(longest), ahead, slots)
        index_N = mx.array(np.asarray(slots, dtype=np.int32))
        for leaf in self.leaves:
            if not isinstance(leaf, LayerKVCache):
                leaf.filter(index_N)

    def ordered(self, slots: NDArray[np.int64], positions_B: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return slots with `positions_B` tokens in the order in which their steps compute least."""
        columns = self.columns.get(None)
        return slots if columns is None else longest_first(slots, columns.held(positions_B)[slots] + 1)

    def waste(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> float:
        """Return the share of a step that free slots and the order of the live ones waste."""
        columns = self.columns.get(None)
        if columns is None:
            return 1.0 - np.count_nonzero(live_B) / len(live_B)
        return wasted(columns.held(positions_B) + 1, live_B, columns.min_saved)

    def grow(self, rows: int) -> None:
        """Append empty slots. Columns that no row has reserved are dropped if the rows exceed the limit with them."""
        shared = self.prompts.tokens if self.prompts is not None else 0
        for columns in self.columns.values():
            columns.drop_beyond((self.limit - shared) // (self.rows + rows))
        for leaf in self.leaves:
            if isinstance(leaf, LayerKVCache):
                leaf.grow(rows)
            else:
                leaf.cache = [mx.concatenate([a, mx.zeros((rows, *a.shape[1:]), a.dtype)]) for a in leaf.cache]
        self.rows += rows
        self.reserved_B = np.append(self.reserved_B, np.zeros(rows, dtype=np.int64))
        if self.prompts is not None:
            self.prompts.grow(rows)

    def clear(self, slot: int) -> None:
        """Zero one slot, and the prompt that it shares."""
        number = 0 if self.prompts is None else int(self.prompts.prompt_B[slot])
        for leaf in self.leaves:
            if not isinstance(leaf, LayerKVCache):
                for array in leaf.cache:
                    array[slot] = 0.0
                continue
            leaf.clear(slot)
            if number and leaf.prompts is not None:
                leaf.prompts.clear(number)

    def parts(
        self,
        token_B: mx.array | NDArray[np.int32],
        positions_B: NDArray[np.int32],
        due_B: NDArray[np.bool_],
        *,
        divided: bool,
    ) -> Generator[None, None, mx.array]:
        """Append a token to every row; return the logits, (B, V), not evaluated. Yields as `RowCaches.parts` says."""
        model = self.layout.model
        self.begin(positions_B, due_B)
        recording = recorded_stages(getattr(model, "layers", ()), gradients=False) if divided else nullcontext()
        with evaluation_mode(model), recording as stages:
            logits_B_V = self.layout.compute(mx.array(token_B)[:, None], self.nested)[:, -1]
        for columns in self.columns.values():
            columns.end()
        yield
        for stage in stages.take() if stages is not None else ():
            mx.eval(stage.arrays)
            yield
        return logits_B_V

    def begin(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> None:
        """Prepare a step that appends one token to every row, which has `positions_B` tokens."""
        offset_B, ahead = mx.array(positions_B), self._ahead(positions_B, live_B)
        for columns in self.columns.values():
            columns.begin(positions_B, live_B, offset_B, ahead)
            if len(columns.runs) > 1 and not self._divides:
                install_cache_attention()
                self._divides = True

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that a step writes. Evaluating them with each step keeps the graph from growing."""
        return [a for leaf in self.leaves for a in (leaf.arrays if isinstance(leaf, LayerKVCache) else leaf.cache)]

    @property
    def tokens(self) -> int:
        """Number of tokens that the largest buffers hold, shared prompts included."""
        shared = self.prompts.tokens if self.prompts is not None else 0
        return self.rows * max((state.capacity for state in self.columns.values()), default=0) + shared


def _can_be_shared(prompt: PrefilledPrompt) -> bool:
    return prompt.rows > 1 and prompt.state is not None


def _write(leaf: Any, slots: slice, state: tuple[mx.array, ...] | None) -> None:
    """Store a copy of a layer's state in each of the slots. state: None for a prompt of one token."""
    if isinstance(leaf, LayerKVCache):
        if state is not None:
            leaf.write(slots, *state)
        return
    for e, array in enumerate(leaf.cache):
        array[slots] = state[e] if state is not None else 0.0


def _runs(slots: Sequence[int]) -> list[slice]:
    """Split increasing slots into runs of consecutive slots."""
    ends = np.flatnonzero(np.diff(slots) != 1) + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in np.split(np.asarray(slots), ends)]
