"""Row layouts of a micro-batch: padded (one sequence per row) and packed (several sequences per row).

In packed rows, block-diagonal causal attention keeps sequences apart. Positions continue through the row. With rotary
embeddings, attention depends on differences of positions only. Results then equal those of a sequence that starts at 0
up to rounding (1 % of the logits in bfloat16, whose rotations are coarse). Other models are refused.

For recurrent layers, the columns of a gap separate the sequences. Their mask excludes the gap, so that convolutions
read zeros there, as before a sequence, and the gated delta rule and state-space layers set their state to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from numpy.typing import NDArray

from clotho.models.attention import AttentionLayers, LayerKeys, LayerState, ResetState, layer_caches
from clotho.models.blocked_attention import VisibleKeys
from clotho.models.head import Blocks
from clotho.scoring.sequences import TrainingSequence


class Placement(NamedTuple):
    """The sequences of a micro-batch in a layout.

    members: indices of the sequences among all sequences. positions: per member, the flat positions of the hidden
    states that predict its tokens, (T,). tokens: number of positions that the blocks compute, padding included.
    """

    members: tuple[int, ...]
    inputs: NamedTuple
    positions: list[NDArray[np.int32]]
    tokens: int


Layout = Callable[[Sequence[TrainingSequence], Sequence[int], int], Iterator[Placement]]
"""layout(sequences, order, budget): places the sequences of `order`, which are sorted by length, within the budget."""


TOKEN_BUCKET = 64
"""The completion tokens of a micro-batch are padded to a multiple of this number."""


def bucket(length: int) -> int:
    """Round up to one of few sizes, multiples of 8, so that buffers and kernels are reused; padding is below 1/8."""
    granularity = max(8, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // granularity) * granularity


class PaddedInputs(NamedTuple):
    """tokens_B_S: prompt and completion without its last token, padded with 0 on the right."""

    tokens_B_S: NDArray[np.int32]


def place_padded(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Split the sequences, longest first, into batches whose number of rows times longest length fits the budget."""
    start = 0
    while start < len(order):
        S = bucket(sequences[order[start]].inputs)
        members = tuple(order[start : start + max(1, budget // S)])
        yield _placed_padded(sequences, members, S)
        start += len(members)


def _placed_padded(sequences: Sequence[TrainingSequence], members: tuple[int, ...], S: int) -> Placement:
    tokens_B_S = np.zeros((len(members), S), dtype=np.int32)
    positions = []
    for row, member in enumerate(members):
        sequence = sequences[member]
        tokens_B_S[row, : sequence.inputs] = (sequence.prompt + sequence.tokens)[:-1]
        positions.append(np.arange(len(sequence.prompt) - 1, sequence.inputs, dtype=np.int32) + row * S)
    return Placement(members, PaddedInputs(tokens_B_S), positions, tokens_B_S.size)


def padded_states(blocks: Blocks, layers: AttentionLayers | None, inputs: PaddedInputs) -> mx.array:
    """Compute all hidden states, (B * S, D); padding on the right has no effect. layers: replace caches if given."""
    keys = None if layers is None else layer_caches(layers)
    hidden_B_S_D = blocks(mx.array(inputs.tokens_B_S), keys)
    return hidden_B_S_D.reshape(-1, hidden_B_S_D.shape[-1])


class PackedInputs(NamedTuple):
    """tokens_R_S: rows of concatenated sequences, each without its last token, padded with 0.

    start_R_S: first column of the sequence at each column; padding counts as a sequence.
    """

    tokens_R_S: NDArray[np.int32]
    start_R_S: NDArray[np.int32]

    def spaced(self, gap: int) -> tuple[PackedInputs, NDArray[np.int32]]:
        """Return the rows with `gap` columns after each sequence, and the new column of each column, (R, S)."""
        R, S = self.start_R_S.shape
        earlier_R_S = np.cumsum(np.diff(self.start_R_S, axis=1, prepend=0) != 0, axis=1)
        column_R_S = (np.arange(S) + gap * earlier_R_S).astype(np.int32)
        spaced = PackedInputs(*np.zeros((2, R, bucket(int(column_R_S.max()) + 1)), dtype=np.int32))
        np.put_along_axis(spaced.tokens_R_S, column_R_S, self.tokens_R_S, axis=1)
        np.put_along_axis(spaced.start_R_S, column_R_S, np.take_along_axis(column_R_S, self.start_R_S, axis=1), axis=1)
        return spaced._replace(start_R_S=np.maximum.accumulate(spaced.start_R_S, axis=1)), column_R_S


def place_packed(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Fill as many rows as the budget allows, first fit decreasing; a row is as long as the longest remaining sequence.

    Rows are not longer because the cost of attention grows with the length of the row, not of the sequence.
    """
    left = list(order)
    while left:
        S = bucket(sequences[left[0]].inputs)
        rows, left = _first_fit(sequences, left, S, max(1, budget // S))
        yield _placed_packed(sequences, rows, S)


def _first_fit(
    sequences: Sequence[TrainingSequence], order: Sequence[int], S: int, limit: int
) -> tuple[list[list[int]], list[int]]:
    """Put each sequence into the first of at most `limit` rows with room; also return the sequences that do not fit."""
    rows: list[list[int]] = []
    room: list[int] = []
    left = []
    for member in order:
        length = sequences[member].inputs
        row = next((row for row, free in enumerate(room) if free >= length), len(rows))
        if row == limit:
            left.append(member)
            continue
        if row == len(rows):
            rows.append([])
            room.append(S)
        rows[row].append(member)
        room[row] -= length
    return rows, left


def _placed_packed(sequences: Sequence[TrainingSequence], rows: Sequence[Sequence[int]], S: int) -> Placement:
    tokens_R_S = np.zeros((len(rows), S), dtype=np.int32)
    start_R_S = np.zeros((len(rows), S), dtype=np.int32)
    positions = []
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            sequence = sequences[member]
            end = start + sequence.inputs
            tokens_R_S[row, start:end] = (sequence.prompt + sequence.tokens)[:-1]
            start_R_S[row, start:end] = start
            positions.append(np.arange(start + len(sequence.prompt) - 1, end, dtype=np.int32) + row * S)
            start = end
        start_R_S[row, start:] = start
    members = tuple(member for row_members in rows for member in row_members)
    return Placement(members, PackedInputs(tokens_R_S, start_R_S), positions, tokens_R_S.size)


class PackedKeys(LayerKeys):
    """Keys of a packed row: a query attends to those of its own sequence."""

    def __init__(self, start_R_S: NDArray[np.int32], layers: AttentionLayers, offset: int) -> None:
        super().__init__(layers)
        self.offset = offset
        self._start_R_S = start_R_S

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | VisibleKeys:
        """Return the block-diagonal causal mask; a window applies inside the blocks."""
        column_R_S = np.broadcast_to(np.arange(tokens, dtype=np.int32), self._start_R_S.shape)
        return self._layers.mask(
            VisibleKeys(column_R_S, column_R_S, first_B_Q=self._start_R_S, window_size=window_size)
        )


class PackedState(LayerState):
    """State of a recurrent layer in packed rows, which is reset at gaps and which nothing reads afterwards.

    A layer has arrays for its convolutions, then one that every token updates. A single array is a convolution's.
    """

    def __init__(self, arrays: int, real_R_S: mx.array) -> None:
        """real_R_S: tokens that belong to sequences."""
        super().__init__(arrays)
        self._real_R_S = real_R_S

    def __getitem__(self, index: int) -> mx.array | ResetState | None:
        super().__getitem__(index)  # raises IndexError
        return ResetState.AT_MASK if 0 < index == self._arrays - 1 else None

    def __setitem__(self, index: int, array: mx.array) -> None:
        """Drop the array."""

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return which tokens belong to sequences, (R, S) booleans."""
        return self._real_R_S


def packed_states(blocks: Blocks, layers: AttentionLayers, inputs: PackedInputs, offset: int = 0) -> mx.array:
    """Compute the hidden states of all positions, (R * S, D). offset: position of the first token of each row."""
    spaced, column_R_S = inputs.spaced(layers.gap)
    real_R_S = np.zeros(spaced.start_R_S.shape, dtype=np.bool_)
    np.put_along_axis(real_R_S, column_R_S, True, axis=1)

    def cache(arrays: int) -> LayerKeys:
        return PackedState(arrays, mx.array(real_R_S)) if arrays else PackedKeys(spaced.start_R_S, layers, offset)

    hidden_R_S_D = blocks(mx.array(spaced.tokens_R_S), tree_map(cache, list(layers.caches)))
    R, S, D = hidden_R_S_D.shape
    hidden_P_D = hidden_R_S_D.reshape(-1, D)
    if column_R_S.shape[1] == S:
        return hidden_P_D
    return hidden_P_D[mx.array(column_R_S + S * np.arange(R)[:, None]).reshape(-1)]
