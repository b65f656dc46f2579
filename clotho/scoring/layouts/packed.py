"""Packed layout: several sequences to a row, kept apart by block-diagonal causal attention.

Positions run through the whole row. Rotary embeddings make attention depend on differences of positions alone, so that
results differ by rounding from those of a sequence that starts at 0 (a hundredth of the logits in bfloat16, whose
rotations are coarse); models that use positions otherwise are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.head import SplitModel
from clotho.models.layer_keys import AttentionLayers, LayerKeys, visible
from clotho.scoring.layouts.packing import Placement, bucket
from clotho.scoring.sequences import TrainingSequence


class PackedInputs(NamedTuple):
    """tokens_R_S: rows of sequences, each without its last token, one after the other; what is left over is 0.

    start_R_S: column where the sequence of each column begins; what is left over counts as a sequence.
    """

    tokens_R_S: NDArray[np.int32]
    start_R_S: NDArray[np.int32]


def place_packed(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Fill rows as long as the longest sequence left, first fit decreasing, as many rows as the budget allows.

    Rows are no longer than that because the cost of attention grows with the length of the row, not of the sequence.
    """
    left = list(order)
    while left:
        S = bucket(sequences[left[0]].inputs)
        rows, left = _first_fit(sequences, left, S, max(1, budget // S))
        yield _placed(sequences, rows, S)


def _first_fit(
    sequences: Sequence[TrainingSequence], order: Sequence[int], S: int, limit: int
) -> tuple[list[list[int]], list[int]]:
    """Put each sequence into the first row with room, in at most `limit` rows; also return those without a place."""
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


def _placed(sequences: Sequence[TrainingSequence], rows: Sequence[Sequence[int]], S: int) -> Placement:
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
    """Keys of a packed row: a query sees those of its own sequence."""

    def __init__(self, start_R_S: mx.array, layers: AttentionLayers, offset: int) -> None:
        self.offset = offset
        self._start_R_S = start_R_S
        self._layers = layers

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the block-diagonal causal mask; a window applies inside the blocks."""
        column_S = mx.arange(tokens)
        mask_R_S_S = visible(column_S[:, None] - column_S, window_size) & (column_S >= self._start_R_S[..., None])
        return self._layers.mask(mask_R_S_S)


def packed_states(split: SplitModel, layers: AttentionLayers, inputs: PackedInputs, offset: int = 0) -> mx.array:
    """Hidden states of all positions, (R * S, D). offset: position of each row's first token."""
    start_R_S = mx.array(inputs.start_R_S)
    keys = [PackedKeys(start_R_S, layers, offset) for _ in range(layers.caches)]
    hidden_R_S_D = split.blocks(mx.array(inputs.tokens_R_S), keys)
    return hidden_R_S_D.reshape(-1, hidden_R_S_D.shape[-1])
