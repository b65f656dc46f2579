"""What running rows keep on the host: KV cache columns, prompts that several rows share, and states of fixed size.

Columns are those of `clotho.inference.kv_cache`: rows are right-aligned, a step writes one column for all rows, and a
row that joins copies its prompt to the left of that column. A prompt of several rows is stored once instead if that
saves enough memory (shared prefixes: Hydragen, arXiv:2402.05099).

After a verification, rows have kept different numbers of tokens. Their newest token is then in different columns: a row
lags behind the column that is written next. The columns are aligned again when they are moved.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from attachments.cpu.attention import AttentionRun, DecodeAttention, SharedPrompt, VerifyAttention
from attachments.cpu.blas import Floats
from attachments.cpu.blocks import AttentionCache
from attachments.cpu.decoder import HostDecoder, StepCaches
from attachments.cpu.decoder_layers import allocated, as_numpy
from attachments.cpu.delta_layer import RowStates
from attachments.cpu.layers import MASKED_SCORE
from clotho.inference.row_runs import RowRun, even_runs, longest_first, wasted
from clotho.inference.rows import DraftedTokens, PrefilledPrompt, PromptState, RouteArray, spare_columns, undivided

MIN_SHARED_TOKENS = 256
"""Minimum number of copied prompt tokens that sharing must save, because it needs more matrix products."""

MIN_SAVED_SCORES = 2048
"""Minimum number of scores that another run of rows must save, because it needs more NumPy calls."""

MIN_FULL = 0.25
"""Buffers of which the rows need a smaller share are replaced by smaller ones when slots are removed."""

ROWS_AHEAD = 8
"""Buffers that become larger have room for this fraction more rows (1/8), which often join one by one."""

NOT_SHARED = -1


class HostKVCache:
    """KV caches of `rows` slots of a decoder.

    column: index of the next column to write. capacity: number of columns of the buffers, which can have room for more
    slots. prompt_B: key of the prompt that a row shares, or NOT_SHARED; the tokens of a shared prompt are in no column.
    """

    arrays: Sequence[mx.array] = ()
    computes_tokens_as_rows = True

    def __init__(self, decoder: HostDecoder, rows: int) -> None:
        self.rows = self._room = rows
        self.limit = sys.maxsize
        self._lag_B = np.zeros(rows, dtype=np.int64)
        self.column = self.capacity = 0
        self.prompt_B = np.full(rows, NOT_SHARED, dtype=np.int64)
        self._decoder = decoder
        self._prompts: dict[int, list[tuple[Floats, Floats]]] = {}
        self._shared: list[SharedPrompt] | None = None
        self._states = RowStates(decoder.state_shapes, rows)
        self._columns: list[tuple[Floats, Floats]] = [
            (allocated((heads, rows, 0, keys)), allocated((heads, rows, 0, values)))
            for heads, keys, values in decoder.column_shapes
        ]

    @property
    def tokens(self) -> int:
        """Number of tokens that the buffers of a layer hold, shared prompts included."""
        return self._room * self.capacity + sum(map(_tokens, self._prompts.values()))

    def has_room(self, prompts: Sequence[PrefilledPrompt]) -> bool:
        """Whether the prompts fit to the left of the current column."""
        return self.capacity > 0 and _columns_needed(prompts) <= self.column

    def make_room(
        self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], prompts: Sequence[PrefilledPrompt]
    ) -> None:
        """Move columns so that the prompts fit to the left of the current one. Live rows have `positions_B` tokens."""
        needed, longest = _columns_needed(prompts), int(self._held(positions_B).max(initial=0, where=live_B))
        if needed > self.column or not self.capacity or self._columns[0][0].shape[1] < self.rows:
            self._move_columns(longest, max(needed, self.column))

    def enter(self, slots: Sequence[int], prompt: PrefilledPrompt) -> None:
        """Store a prompt for slots: one shared copy if that saves enough memory, otherwise one copy per slot."""
        self.prompt_B[list(slots)] = NOT_SHARED
        self._lag_B[list(slots)] = 0
        self._drop_unused_prompts()
        if prompt.state is None:
            self._states.clear(slots)
            return
        attention, delta = self._decoder.divided(prompt.state)
        self._states.put(slots, delta)
        tokens = slice(prompt.tokens)
        layers = [(as_numpy(keys)[0][:, tokens], as_numpy(values)[0][:, tokens]) for keys, values in attention]
        if _is_shared(prompt):
            key = 1 + max(self._prompts, default=NOT_SHARED)
            self._prompts[key] = [(_copied(keys), _copied(values)) for keys, values in layers]
            self.prompt_B[list(slots)] = key
            return
        before = slice(self.column - prompt.tokens, self.column)
        for (keys, values), (new_keys, new_values) in zip(self._columns, layers, strict=True):
            keys[:, list(slots), before] = new_keys[:, None]
            values[:, list(slots), before] = new_values[:, None]

    def state(self, slot: int, tokens: int) -> PromptState:
        """Return a copy of the KV cache of a row of `tokens` tokens, as prefill returns it."""
        read = [self._read(layer, slot, tokens) for layer in range(len(self._columns))]
        layers = [tuple(mx.array(np.ascontiguousarray(one)[None]) for one in arrays) for arrays in read]
        state = self._decoder.joined(layers, self._states.of(slot))
        mx.eval(state)
        return tuple(state)

    def _read(self, layer: int, slot: int, tokens: int) -> list[Floats]:
        """Return keys and values of a row of `tokens` tokens, (K, tokens, D), with its shared prompt."""
        end, key = self.column - int(self._lag_B[slot]), int(self.prompt_B[slot])
        prompts = self._prompts.get(key, [])
        held = tokens - (_tokens(prompts) if prompts else 0)
        own = [columns[:, slot, end - held : end] for columns in self._columns[layer]]
        return [np.concatenate(parts, axis=1) for parts in zip(prompts[layer], own, strict=True)] if prompts else own

    def routes(self, slot: int, tokens: int) -> RouteArray | None:
        """Return a copy of the routes of a row of `tokens` tokens; None for a model without experts."""
        layers, dtype = self._decoder.expert_layers, self._decoder.route_dtype
        return self._read(-1, slot, tokens)[0][0].astype(dtype).reshape(tokens, layers, -1) if layers else None

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens, and free unused columns."""
        self.prompt_B = self.prompt_B[list(slots)]
        self.rows = len(slots)
        self._states.take(slots, self.rows)
        self._drop_unused_prompts()
        longest = int(self._held(positions_N).max(initial=0))
        tokens = self._room * self.capacity
        is_full = self.rows * (longest + spare_columns(longest)) >= MIN_FULL * tokens and tokens <= self.limit
        if is_full and not self.is_lagging:
            self._move_rows(slots, slice(self.column - longest, self.column))
        else:
            self._room = self.rows
            self._move_columns(longest, longest, list(slots))

    def _move_rows(self, slots: Sequence[int], columns: slice) -> None:
        """Move the columns of slots to the first slots, in this order, in the same buffers."""
        moved = np.flatnonzero(np.asarray(slots) != np.arange(len(slots)))
        if len(moved):
            first, last = int(moved[0]), int(moved[-1]) + 1
            slot_N = np.asarray(slots[first:last])
            runs = np.split(np.arange(last - first), np.flatnonzero(np.diff(slot_N) != 1) + 1)
            copies = dict[tuple[int, ...], Floats]()  # one for all layers: the first use of memory takes longest
            for held in (held for layer in self._columns for held in layer):
                rows = held[:, first:last, columns]
                copy = copies.setdefault(rows.shape, np.empty(rows.shape, np.float32))
                for run in runs:
                    copy[:, run[0] : run[-1] + 1] = held[:, slot_N[run[0]] : slot_N[run[-1]] + 1, columns]
                rows[:] = copy
        self._lag_B = np.zeros(self.rows, dtype=np.int64)

    def ordered(self, slots: NDArray[np.int64], positions_B: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return slots with `positions_B` tokens in the order in which their steps compute least."""
        return longest_first(slots, self._held(positions_B)[slots] + 1)

    def waste(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_]) -> float:
        """Return the share of a step that free slots and the order of the live ones waste."""
        return wasted(self._held(positions_B) + 1, live_B, MIN_SAVED_SCORES)

    def grow(self, rows: int) -> None:
        """Append empty slots; `make_room` then replaces buffers without room for them."""
        self.prompt_B = np.append(self.prompt_B, np.full(rows, NOT_SHARED))
        self._lag_B = np.append(self._lag_B, np.zeros(rows, dtype=np.int64))
        first, self.rows = self.rows, self.rows + rows
        self._states.take(range(first), self.rows)
        self._shared = None
        if self.rows > self._room:
            self._room = max(self.rows, min(self.rows + self.rows // ROWS_AHEAD, self.limit // max(1, self.capacity)))
            return
        for keys, values in self._columns:  # other rows were here, see `clear`
            keys[:, first : self.rows] = values[:, first : self.rows] = 0.0

    def clear(self, slot: int) -> None:
        """Zero a slot. NaN or inf in masked positions would spread, since 0 * NaN = NaN."""
        self._states.clear([slot])
        for keys, values in self._columns:
            keys[:, slot] = 0.0
            values[:, slot] = 0.0

    def parts(
        self,
        token_B: mx.array | NDArray[np.int32],
        positions_B: NDArray[np.int32],
        due_B: NDArray[np.bool_],
        *,
        divided: bool,
    ) -> Generator[None, None, Floats]:
        """Append one token to every row of `positions_B` tokens; return the logits, (B, V), in a new array.

        Yields where other steps can be computed, whether `divided` or not: this costs nothing.
        """
        held_B = self._held(positions_B)
        longest = int(held_B[due_B].max())
        if self.column >= self.capacity or self.is_lagging:
            self._move_columns(longest, longest)
        first, last = self.column - longest, self.column + 1
        attention = self._attention(np.minimum(held_B, longest), due_B)
        caches = self._caches(attention, slice(first, last))
        self.column = last
        return (yield from self._decoder.parts(np.array(token_B), positions_B, caches))

    def _caches(self, attention: DecodeAttention, columns: slice) -> StepCaches:
        layers = [
            AttentionCache(
                keys[:, : self.rows, columns],
                values[:, : self.rows, columns],
                {key: layers[n] for key, layers in self._prompts.items()},
            )
            for n, (keys, values) in enumerate(self._columns)
        ]
        return StepCaches(attention, self._decoder.joined(layers, self._states.layers))

    @property
    def is_lagging(self) -> bool:
        """Whether the newest tokens of the rows are in different columns."""
        return bool(self._lag_B.any())

    def verify(self, tokens: DraftedTokens, positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]) -> Floats:
        """Compute the logits of the newest token and the draft of every row, (N, V), in a new array.

        `keep` must follow: until then, no row has kept a token.
        """
        held_B = np.where(due_B, self._held(positions_B), 0)
        self._lag_B[~due_B] = 0
        if self.column + tokens.width > self.capacity:
            self._move_columns(int(held_B.max()), int(held_B.max()))
        start_B = self.column - self._lag_B
        first, last = int((start_B - held_B).min()), self.column + tokens.width
        shared = self._shared_groups()
        attention = VerifyAttention(
            self._decoder.query_shape(self.rows),
            tokens,
            shared=shared,
            columns=last - first,
            start_B=start_B - first,
            mask_B_T_S=self._verify_mask(held_B, start_B - first, tokens.width, last - first),
        )
        position_N = positions_B[tokens.row_N] + tokens.index_N
        return undivided(self._decoder.parts(tokens.token_N, position_N, self._caches(attention, slice(first, last))))

    def _verify_mask(self, held_B: NDArray[np.int32], start_B: NDArray[np.int64], width: int, columns: int) -> Floats:
        """Return what is added to the scores of each of the T tokens of a row: prompts first, then columns."""
        longest = max((one.tokens for one in self._shared_groups()), default=0)
        mask_B_T_S = np.zeros((self.rows, width, longest + columns), np.float32)
        mask_B_T_S[:, :, :longest] = np.where(np.arange(longest) >= self._shared_tokens()[:, None], MASKED_SCORE, 0.0)[
            :, None
        ]
        behind_B_C = np.arange(columns) - start_B[:, None]
        hidden_B_T_C = (behind_B_C < -held_B[:, None])[:, None] | (behind_B_C[:, None] > np.arange(width)[:, None])
        mask_B_T_S[:, :, longest:][hidden_B_T_C] = MASKED_SCORE
        return mask_B_T_S

    def keep(self, kept_B: NDArray[np.int64]) -> None:
        """Keep the first `kept_B` tokens of each row of the verification; the next step overwrites the others."""
        end_B = self.column - self._lag_B + kept_B
        self.column = int(end_B.max())
        self._lag_B = np.where(kept_B > 0, self.column - end_B, 0)

    def discard(self, count_B: NDArray[np.int64]) -> None:
        """Discard the newest `count_B` tokens of each row. If any count is not 0, rows with count 0 have no tokens."""
        if count_B.any():
            end_B = self.column - self._lag_B - count_B
            self.column = int(end_B[count_B > 0].max())
            self._lag_B = np.where(count_B > 0, self.column - end_B, 0)

    def _attention(self, held_B: NDArray[np.int32], due_B: NDArray[np.bool_]) -> DecodeAttention:
        """Compute which keys each row attends to. Rows that are not due attend to their newest token."""
        runs = [self._run(run, held_B[run.rows], due_B[run.rows]) for run in even_runs(held_B + 1, MIN_SAVED_SCORES)]
        return DecodeAttention(self._decoder.query_shape(self.rows), runs)

    def _run(self, run: RowRun, held_B: NDArray[np.int32], due_B: NDArray[np.bool_]) -> AttentionRun:
        columns, shared = run.columns, list(_within(self._shared_groups(), run.rows))
        longest, tokens_B = max((one.tokens for one in shared), default=0), self._shared_tokens()[run.rows]
        mask_B_S = None
        if (tokens_B[due_B] < longest).any() or (held_B[due_B] < columns - 1).any():
            mask_B_S = np.zeros((len(held_B), longest + columns), np.float32)
            mask_B_S[:, :longest][np.arange(longest) >= tokens_B[:, None]] = MASKED_SCORE
            mask_B_S[:, longest:][np.arange(columns)[::-1] > held_B[:, None]] = MASKED_SCORE
        return AttentionRun(run, shared, None if mask_B_S is None else mask_B_S[:, None])

    def _held(self, positions_B: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return how many tokens each row has in columns."""
        held_B: NDArray[np.int32] = np.maximum(positions_B - self._shared_tokens(), 0)
        return held_B

    def _shared_groups(self) -> list[SharedPrompt]:
        """Return the groups of neighbouring rows that share a prompt; cached until rows change."""
        if self._shared is None:
            self._shared = [
                SharedPrompt(key, rows, _tokens(layers))
                for key, layers in self._prompts.items()
                for rows in _runs(self.prompt_B == key)
            ]
        return self._shared

    def _shared_tokens(self) -> NDArray[np.int32]:
        """Return how many tokens each row has in a shared prompt."""
        tokens_B = np.zeros(self.rows, dtype=np.int32)
        for one in self._shared_groups():
            tokens_B[one.rows] = one.tokens
        return tokens_B

    def _drop_unused_prompts(self) -> None:
        used, self._shared = set(self.prompt_B.tolist()), None
        self._prompts = {key: layers for key, layers in self._prompts.items() if key in used}

    def _move_columns(self, longest: int, column: int, slots: list[int] | None = None) -> None:
        """Move the columns of rows with up to `longest` tokens so that they end before `column`.

        The new buffers have room for more slots only as far as they do not become larger. If their size stays, each
        layer gets the buffer that the layer before has left: the first use of memory takes longer than a copy.
        """
        kept, tokens = min(longest, self.column), self._room * self.capacity
        start, stop = self.column - kept, self.column
        spare = spare_columns(column)
        if slots is not None or not spare // 2 <= self.capacity - column <= 2 * spare:
            self.capacity = column + spare
        self._room = max(self.rows, min(self._room, tokens // self.capacity))
        held_rows = min(self.rows, self._columns[0][0].shape[1])
        rows, lag_B = slice(held_rows) if slots is None else slots, self._lag_B if self.is_lagging else None

        def moved_columns(held: Floats) -> Floats:
            """Return keys or values in a buffer of the new capacity, in the new order of rows and columns."""
            shape = (len(held), self._room, self.capacity, held.shape[-1])
            moved = left.pop(shape, None) if slots is None else None
            moved = allocated(shape) if moved is None else moved
            target = moved[:, : held_rows if slots is None else len(slots), column - kept : column]
            if lag_B is None:
                target[:] = held[:, rows, start:stop]
            else:
                column_B_C = np.maximum(np.arange(start, stop) - lag_B[rows, None], 0)
                target[:] = np.take_along_axis(held[:, rows], column_B_C[None, ..., None], 2)
            left[held.shape] = held
            return moved

        left: dict[tuple[int, ...], Floats] = {}
        for layer, (keys, values) in enumerate(self._columns):
            self._columns[layer] = moved_columns(keys), moved_columns(values)
        self.column, self._lag_B = column, np.zeros(self.rows, dtype=np.int64)


def _within(groups: Sequence[SharedPrompt], rows: slice) -> Iterator[SharedPrompt]:
    """Yield the groups of these rows; of a group that extends beyond them, the part within."""
    for one in groups:
        start, stop = max(one.rows.start, rows.start), min(one.rows.stop, rows.stop)
        if start < stop:
            yield one._replace(rows=slice(start, stop))


def _tokens(layers: list[tuple[Floats, Floats]]) -> int:
    """Return the length of a shared prompt."""
    return int(layers[0][0].shape[1])


def _is_shared(prompt: PrefilledPrompt) -> bool:
    return (prompt.rows - 1) * prompt.tokens >= MIN_SHARED_TOKENS


def _columns_needed(prompts: Sequence[PrefilledPrompt]) -> int:
    """Return the number of columns that the prompts need."""
    return max((prompt.tokens for prompt in prompts if not _is_shared(prompt)), default=0)


def _copied(x: Floats) -> Floats:
    """Return a copy: a view would keep the whole cache of the prefill batch alive."""
    copy = allocated(x.shape)
    copy[:] = x
    return copy


def _runs(member_B: NDArray[np.bool_]) -> list[slice]:
    """Return the runs of neighbouring members."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], member_B, [False]])))
    return [slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
