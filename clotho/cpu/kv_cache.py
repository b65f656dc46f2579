"""The caches of the running rows on the host: columns of their own, and prompts that several of them have in common.

Columns are those of `clotho.inference.kv_cache`: right-aligned, a step writes one for all rows, and a row that
joins copies its prompt to the left of it. A prompt that is worth it stays where it was computed instead, once for all
of its rows (shared prefixes: Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.cpu.blas import Floats
from clotho.cpu.decode_attention import UNSEEN, Sharers, StepAttention
from clotho.cpu.decoder import HostDecoder, Layers, seen
from clotho.inference.cache_layout import Arrival
from clotho.inference.kv_cache import spare_columns

WORTH_SHARING = 256
"""Copies of prompt tokens that sharing must spare, for it takes more products."""

NONE = -1


class HostCache:
    """Caches of `rows` slots of a decoder.

    column: where the next token is written. capacity: columns of the buffers. prompt_B: the prompt that a row shares,
    or NONE; its tokens stand in no column.
    """

    arrays: Sequence[mx.array] = ()

    def __init__(self, decoder: HostDecoder, rows: int) -> None:
        self.rows = rows
        self.column = self.capacity = 0
        self.prompt_B = np.full(rows, NONE, dtype=np.int64)
        self._decoder = decoder
        self._prompts: dict[int, list[tuple[Floats, Floats]]] = {}
        self._sharers: list[Sharers] | None = None
        self._columns: list[tuple[Floats, Floats]] = [
            (_zeros(decoder, rows, 0), _zeros(decoder, rows, 0)) for _ in range(decoder.depth)
        ]

    @property
    def tokens(self) -> int:
        """Tokens that the buffers of a layer have room for, shared prompts included."""
        return self.rows * self.capacity + sum(map(_tokens, self._prompts.values()))

    def has_room(self, arrivals: Sequence[Arrival]) -> bool:
        """Say whether prompts fit before the current column as it is."""
        return self.capacity > 0 and _longest(arrivals) <= self.column

    def make_room(self, positions_B: NDArray[np.int32], live_B: NDArray[np.bool_], arrivals: Sequence[Arrival]) -> None:
        """See to it that prompts fit before the current column, beside live rows of `positions_B` tokens."""
        needed, longest = _longest(arrivals), int(self._held(positions_B).max(initial=0, where=live_B))
        if needed > self.column or not self.capacity:
            self._place(longest, max(needed, longest))

    def enter(self, slots: Sequence[int], arrival: Arrival) -> None:
        """Put a computed prompt into slots: one for all of them if that is worth it, else a copy for each."""
        self.prompt_B[list(slots)] = NONE
        self._forget_unused()
        if arrival.state is None:
            return
        layers = [(seen(keys)[0], seen(values)[0]) for keys, values in arrival.state]
        if _shares(arrival):
            place = 1 + max(self._prompts, default=NONE)
            self._prompts[place] = [(_copied(keys), _copied(values)) for keys, values in layers]
            self.prompt_B[list(slots)] = place
            return
        before = slice(self.column - arrival.tokens, self.column)
        for (keys, values), (new_keys, new_values) in zip(self._columns, layers, strict=True):
            keys[:, list(slots), before] = new_keys[:, None]
            values[:, list(slots), before] = new_values[:, None]

    def take(self, slots: Sequence[int], positions_N: NDArray[np.int32]) -> None:
        """Keep only these slots, in this order, with `positions_N` tokens; give back columns that none needs."""
        self.prompt_B = self.prompt_B[list(slots)]
        self.rows = len(slots)
        self._forget_unused()
        longest = int(self._held(positions_N).max(initial=0))
        self._place(longest, longest, list(slots))

    def grow(self, rows: int) -> None:
        """Append empty slots."""
        self.prompt_B = np.append(self.prompt_B, np.full(rows, NONE))
        self.rows += rows
        self._sharers = None
        self._columns = [(self._grown(keys), self._grown(values)) for keys, values in self._columns]

    def clear(self, slot: int) -> None:
        """Zero a slot: what is not finite would reach later rows through the hidden part of a product."""
        for keys, values in self._columns:
            keys[:, slot] = 0.0
            values[:, slot] = 0.0

    def logits(
        self, token_B: mx.array | NDArray[np.int32], positions_B: NDArray[np.int32], due_B: NDArray[np.bool_]
    ) -> Floats:
        """Compute a step in which every row adds one token after the `positions_B` it has; (B, V), the caller's."""
        held_B = self._held(positions_B)
        longest = int(held_B[due_B].max())
        if self.column >= self.capacity:
            self._place(longest, longest)
        first, last = self.column - longest, self.column + 1
        attention = self._attention(np.minimum(held_B, longest), longest + 1, due_B)
        layers = Layers(
            attention=attention,
            columns=[(keys[:, :, first:last], values[:, :, first:last]) for keys, values in self._columns],
            prompts=[{place: layers[n] for place, layers in self._prompts.items()} for n in range(len(self._columns))],
        )
        self.column = last
        return self._decoder.logits(np.array(token_B), positions_B, layers)

    def _attention(self, held_B: NDArray[np.int32], columns: int, due_B: NDArray[np.bool_]) -> StepAttention:
        """Work out what each row sees; rows that are not due see their newest token."""
        sharers = self._neighbours()
        longest = max((one.tokens for one in sharers), default=0)
        tokens_B = self._shared_tokens()
        hidden_B_S = np.zeros((self.rows, longest + columns), np.float32)
        hidden_B_S[:, :longest][np.arange(longest) >= tokens_B[:, None]] = UNSEEN
        hidden_B_S[:, longest:][np.arange(columns)[::-1] > held_B[:, None]] = UNSEEN
        anything = bool((tokens_B[due_B] < longest).any() or (held_B[due_B] < columns - 1).any())
        shape_K_B_R_D = self._decoder.queries(self.rows)
        return StepAttention(
            shape_K_B_R_D, sharers=sharers, columns=columns, hidden_B_S=hidden_B_S if anything else None
        )

    def _held(self, positions_B: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens that rows have in columns."""
        held_B: NDArray[np.int32] = np.maximum(positions_B - self._shared_tokens(), 0)
        return held_B

    def _neighbours(self) -> list[Sharers]:
        """Rows that share prompts, until others do."""
        if self._sharers is None:
            self._sharers = [
                Sharers(place, rows, _tokens(layers))
                for place, layers in self._prompts.items()
                for rows in _runs(self.prompt_B == place)
            ]
        return self._sharers

    def _shared_tokens(self) -> NDArray[np.int32]:
        """Tokens that rows have in prompts that they share."""
        tokens_B = np.zeros(self.rows, dtype=np.int32)
        for one in self._neighbours():
            tokens_B[one.rows] = one.tokens
        return tokens_B

    def _forget_unused(self) -> None:
        used, self._sharers = set(self.prompt_B.tolist()), None
        self._prompts = {place: layers for place, layers in self._prompts.items() if place in used}

    def _place(self, longest: int, column: int, slots: list[int] | None = None) -> None:
        """Move columns of rows with up to `longest` tokens in them so that they end before `column`."""
        kept = min(longest, self.column)
        start, stop = self.column - kept, self.column
        self.capacity = column + spare_columns(column)

        def placed(held: Floats) -> Floats:
            moved = _zeros(self._decoder, self.rows, self.capacity)
            moved[:, :, column - kept : column] = held[:, slice(None) if slots is None else slots, start:stop]
            return moved

        self._columns = [(placed(keys), placed(values)) for keys, values in self._columns]
        self.column = column

    def _grown(self, held: Floats) -> Floats:
        grown = _zeros(self._decoder, self.rows, held.shape[2])
        grown[:, : held.shape[1]] = held
        return grown


def _tokens(layers: list[tuple[Floats, Floats]]) -> int:
    """Of a shared prompt."""
    return int(layers[0][0].shape[1])


def _shares(arrival: Arrival) -> bool:
    return (arrival.rows - 1) * arrival.tokens >= WORTH_SHARING


def _longest(arrivals: Sequence[Arrival]) -> int:
    """Tokens that must find room in columns."""
    return max((arrival.tokens for arrival in arrivals if not _shares(arrival)), default=0)


def _zeros(decoder: HostDecoder, rows: int, columns: int) -> Floats:
    """A buffer of keys or values, (K, rows, columns, D)."""
    heads, size = decoder.key_shape
    return _allocated((heads, rows, columns, size))


def _allocated(shape: tuple[int, ...]) -> Floats:
    """Zeros that MLX allocates, so that they count as MLX's memory."""
    buffer = mx.zeros(shape)
    mx.eval(buffer)
    return seen(buffer)


def _copied(x: Floats) -> Floats:
    """What stands in a computed cache holds on to all of it: room for more tokens, and the prompts beside."""
    copy = _allocated(x.shape)
    copy[:] = x
    return copy


def _runs(member_B: NDArray[np.bool_]) -> list[slice]:
    """Neighbouring members."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], member_B, [False]])))
    return [slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]
