"""Prompts that several rows of the batch share in MLX: stored once, and read once per decode step.

A row of a group attends to the prompt of its group and to columns of its own. The scores of both are computed side by
side and take one softmax, so the result is that of attention over a copy of the prompt in each row (Hydragen,
arXiv:2402.05099, merges two softmaxes instead). Queries of all rows of a group are multiplied by its prompt at once.

Terms: a cell is a place for one row in a table of F prompts with G cells each. Rows without a shared prompt use a cell
of the empty prompt, which has number 0 and no visible token. Axes: F prompts, G rows of a prompt, K key heads, R query
heads per key head, P tokens of a prompt, C own columns, D width of a head, N queries as one list.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.cache_layout import AttentionLeaf
from clotho.inference.kv_format import Held, each
from clotho.inference.row_runs import RowRun
from clotho.inference.rows import PrefilledPrompt

NOT_SHARED = 0
"""Number of the empty prompt, of rows that share none."""


class RowGroups(NamedTuple):
    """How the rows of a step share prompts. read: the prompts that the step reads.

    row_F_G: row of each cell; cells without a row repeat row 0. cell_B: cell of each row, as F x G + G. bias_F_P: 0 for
    the tokens of a prompt, minus infinity behind them.
    """

    read: slice
    row_F_G: NDArray[np.int64]
    cell_B: NDArray[np.int64]
    bias_F_P: NDArray[np.float32]


class GroupIndices(NamedTuple):
    """Row groups as indices into lists of queries, for K key heads and R query heads per key head.

    query: number of the query of each (F, K, G R). place: place of each query in that list, (B, K, R, 1). bias: (F, 1,
    1, P), or one number if all prompts have the same length. read, tokens: which prompts the step reads, and how many
    tokens.
    """

    query: mx.array
    place: mx.array
    bias: mx.array
    read: slice
    tokens: int


class PromptArrays:
    """Keys and values of the shared prompts in one layer, (F, K, P, D) as held; zero behind the tokens of a prompt."""

    def __init__(self, leaf: AttentionLeaf) -> None:
        self.format = leaf.format
        self.keys = leaf.format.empty(1, *leaf.key_shape, leaf.dtype)
        self.values = leaf.format.empty(1, *leaf.value_shape, leaf.dtype)
        self._views: tuple[Held, Held] | None = None

    def views(self, groups: GroupIndices) -> tuple[Held, Held]:
        """Return the transposed keys and the values that a step reads; the same until `forget_views`."""
        if self._views is None:
            keys, values = (
                each(lambda x: x[groups.read, :, : groups.tokens], held) for held in (self.keys, self.values)
            )
            self._views = self.format.transposed(keys), values
        return self._views

    def read(self, number: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values of a prompt of `tokens` tokens, (1, K, tokens, D)."""
        keys, values = (each(lambda x: x[number : number + 1, :, :tokens], held) for held in (self.keys, self.values))
        return self.format.unpacked(keys), self.format.unpacked(values)

    def forget_views(self) -> None:
        """Forget the views, because groups have changed, or because a write would copy arrays that have views."""
        self._views = None

    def reserve(self, prompts: int, tokens: int) -> None:
        """Allocate larger arrays unless there is room for so many prompts and tokens."""
        enlarged = partial(_enlarged, prompts, tokens)
        self.keys, self.values = each(enlarged, self.keys), each(enlarged, self.values)

    def write(self, number: int, keys: mx.array, values: mx.array) -> None:
        """Store a prompt, (1, K, tokens, D), for which there is room."""
        self.forget_views()
        for held, new in ((self.keys, keys), (self.values, values)):
            for array, part in zip(held, self.format.packed(new), strict=True):
                array[number, :, : new.shape[2]] = part[0]
                array[number, :, new.shape[2] :] = 0

    def take(self, numbers: Sequence[int], tokens: int) -> None:
        """Keep the prompts of these numbers, in this order, and room for `tokens` tokens."""
        index_F = mx.array(np.asarray(numbers, dtype=np.int32))
        kept = [each(lambda x: x[:, :, :tokens][index_F], held) for held in (self.keys, self.values)]
        self.keys, self.values = kept

    def clear(self, number: int) -> None:
        """Zero a prompt."""
        self.forget_views()
        for array in (*self.keys, *self.values):
            array[number] = 0


def _enlarged(prompts: int, tokens: int, held: mx.array) -> mx.array:
    had, heads, room, size = held.shape
    if prompts <= had and tokens <= room:
        return held
    larger = mx.zeros((max(prompts, had), heads, max(tokens, room), size), held.dtype)
    larger[:had, :, :room] = held
    return larger


class SharedPrompts:
    """Which rows share which prompts, and the arrays of all layers that share prompts.

    prompt_B: number of the prompt of each row. tokens_F: length of each prompt; 0 = unused. room: number of tokens that
    the arrays have room for in each prompt. layers: one per layer.
    """

    def __init__(self, rows: int) -> None:
        self.prompt_B = np.full(rows, NOT_SHARED, dtype=np.int64)
        self.tokens_F = np.zeros(1, dtype=np.int32)
        self.layers: list[PromptArrays] = []
        self.room = 0
        self._groups: RowGroups | None = None
        self._indices: dict[tuple[int, int, mx.Dtype], GroupIndices] = {}

    @property
    def active(self) -> bool:
        """Whether any prompt is shared."""
        return bool(self.tokens_F.any())

    @property
    def tokens(self) -> int:
        """Number of tokens that the arrays of a layer have room for."""
        return len(self.tokens_F) * self.room

    @property
    def tokens_B(self) -> NDArray[np.int32]:
        """Number of tokens of each row that are in a shared prompt."""
        tokens_B: NDArray[np.int32] = self.tokens_F[self.prompt_B]
        return tokens_B

    def reserve(self, prompts: Sequence[PrefilledPrompt]) -> None:
        """Allocate room for prompts that will be added."""
        unused = int(np.count_nonzero(self.tokens_F[1:] == 0))
        more = np.zeros(max(0, len(prompts) - unused), dtype=np.int32)
        self.tokens_F = np.append(self.tokens_F, more)
        self.room = max(self.room, *(prompt.tokens for prompt in prompts))
        for layer in self.layers:
            layer.reserve(len(self.tokens_F), self.room)

    def add(self, slots: Sequence[int], tokens: int) -> int:
        """Let rows share a prompt of `tokens` tokens, for which room is reserved; return its number."""
        self.remove(slots)
        number = 1 + int(np.flatnonzero(self.tokens_F[1:] == 0)[0])
        self.tokens_F[number] = tokens
        self.prompt_B[list(slots)] = number
        return number

    def remove(self, slots: Sequence[int]) -> None:
        """Let rows share no prompt, and free the prompts without rows."""
        self.prompt_B[list(slots)] = NOT_SHARED
        self._free_unused()

    def _free_unused(self) -> None:
        self.tokens_F[~np.isin(np.arange(len(self.tokens_F)), self.prompt_B)] = 0
        self._groups = None

    def take(self, slots: Sequence[int]) -> None:
        """Keep only these rows, in this order, and their prompts."""
        self.prompt_B = self.prompt_B[list(slots)]
        self._free_unused()
        kept = [NOT_SHARED, *np.flatnonzero(self.tokens_F).tolist()]
        self.prompt_B = np.searchsorted(kept, self.prompt_B)
        self.tokens_F = self.tokens_F[kept]
        self.room = int(self.tokens_F.max())
        for layer in self.layers:
            layer.take(kept, self.room)
        self.evaluate()

    def evaluate(self) -> None:
        """Start the evaluation of the arrays, which are not evaluated with each step."""
        mx.async_eval([(layer.keys, layer.values) for layer in self.layers])

    def grow(self, rows: int) -> None:
        """Append rows that share no prompt."""
        self.prompt_B = np.append(self.prompt_B, np.full(rows, NOT_SHARED))
        self._groups = None

    def begin(self, live_B: NDArray[np.bool_]) -> None:
        """Prepare a step. Groups are computed again when rows have joined or moved. live_B: rows that are used."""
        if self._groups is None:
            self._groups, self._indices = self._grouped(live_B), {}
            for layer in self.layers:
                layer.forget_views()

    def _grouped(self, live_B: NDArray[np.bool_]) -> RowGroups:
        first = NOT_SHARED if (self.prompt_B[live_B] == NOT_SHARED).any() else NOT_SHARED + 1
        members = [np.flatnonzero((self.prompt_B == number) & live_B) for number in range(first, len(self.tokens_F))]
        width = max(1, *(len(rows) for rows in members))
        row_F_G = np.zeros((len(members), width), dtype=np.int64)
        cell_B = np.zeros(len(self.prompt_B), dtype=np.int64)
        for f, rows in enumerate(members):
            row_F_G[f, : len(rows)] = rows
            cell_B[rows] = f * width + np.arange(len(rows))
        hidden_F_P = np.arange(self.tokens_F.max()) >= self.tokens_F[first:, None]
        bias_F_P = np.where(hidden_F_P, np.float32(-np.inf), np.float32(0.0))
        return RowGroups(slice(first, len(self.tokens_F)), row_F_G, cell_B, bias_F_P)

    def indices(self, key_heads: int, repeats: int, dtype: mx.Dtype) -> GroupIndices:
        """Return the groups of the current step for layers with these heads. repeats: query heads per key head."""
        key = (key_heads, repeats, dtype)
        if key not in self._indices:
            assert self._groups is not None
            self._indices[key] = _indices(self._groups, *key)
        return self._indices[key]


def _indices(groups: RowGroups, key_heads: int, repeats: int, dtype: mx.Dtype) -> GroupIndices:
    (prompts, width), rows = groups.row_F_G.shape, len(groups.cell_B)
    head_K_1, repeat_R = np.arange(key_heads)[:, None], np.arange(repeats)
    query_F_K_G_R = (groups.row_F_G[:, None, :, None] * key_heads + head_K_1[:, :, None]) * repeats + repeat_R
    prompt_B, cell_B = np.divmod(groups.cell_B, width)
    place_B_K_1 = (prompt_B[:, None, None] * key_heads + head_K_1) * width + cell_B[:, None, None]
    place_B_K_R = place_B_K_1 * repeats + repeat_R
    bias = groups.bias_F_P[:, None, None] if np.isinf(groups.bias_F_P).any() else np.zeros(1, dtype=np.float32)
    return GroupIndices(
        mx.array(query_F_K_G_R.astype(np.int32).reshape(prompts, key_heads, width * repeats)),
        mx.array(place_B_K_R.astype(np.int32).reshape(rows, key_heads, repeats, 1)),
        mx.array(bias).astype(dtype),
        groups.read,
        groups.bias_F_P.shape[1],
    )


def grouped_attention(
    queries: mx.array,
    own: tuple[Held, Held],
    prompts: PromptArrays,
    groups: GroupIndices,
    bias_B_C: mx.array,
    scale: float,
    runs: Sequence[RowRun],
) -> mx.array:
    """Compute attention of the queries of each row, (B, K R, T, D), over the prompt of its group and its own columns.

    own: keys and values, (B, K, C, D), as the prompts are held. groups: indices for R T query heads per key head.
    bias_B_C: added to the scores of own columns, (B, 1, 1 or R T, 1, C) or one number. runs: of all rows; each attends
    to its newest columns.
    Rows of own columns are multiplied one by one, as vectors: Metal pads small matrices.
    """
    keys, values = own
    form, (prompt_keys, prompt_values) = prompts.format, prompts.views(groups)
    (B, heads, T, D), K, C, P = queries.shape, keys[0].shape[1], keys[0].shape[2], groups.tokens
    query_B = queries.reshape(B, K, heads // K * T, 1, D)
    query_F = mx.take(queries.reshape(-1, D), groups.query, axis=0)
    score_F = form.scores(query_F, prompt_keys, groups.bias, scale)
    score_P = mx.take(score_F.reshape(-1, P), groups.place, axis=0)
    weights_P, weights_C = [], []
    for rows, columns in runs:
        newest = slice(C - columns, None)
        bias = bias_B_C[rows, ..., newest] if bias_B_C.ndim > 1 else bias_B_C
        own_keys = each(lambda x: x[:, :, None], form.transposed(tuple(a[rows, :, newest] for a in keys)))
        score_C = form.scores(query_B[rows], own_keys, bias, scale)
        weight = mx.softmax(mx.concatenate([score_P[rows], score_C], axis=-1), axis=-1, precise=True)
        weight_P, weight_C = mx.split(weight, [P], axis=-1)
        weights_P.append(weight_P)
        weights_C.append(weight_C)
    weight_P = _joined(weights_P)
    part_F = form.sums(mx.take(weight_P.reshape(-1, P), groups.query, axis=0), prompt_values)
    part = mx.take(part_F.reshape(-1, part_F.shape[-1]), groups.place, axis=0)
    attended = []
    for (rows, columns), weight_C in zip(runs, weights_C, strict=True):
        own_values = tuple(a[rows, :, C - columns :][:, :, None] for a in values)
        attended.append(form.sums(weight_C, own_values, part[rows]))
    return _joined(attended).reshape(B, heads, T, -1)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
