"""Padded layout: one sequence per row, filled up on the right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.head import SplitModel
from clotho.models.layer_keys import AttentionLayers, LayerKeys
from clotho.scoring.layouts.packing import Placement, bucket
from clotho.scoring.sequences import TrainingSequence


class PaddedInputs(NamedTuple):
    """tokens_B_S: prompt and completion without its last token, padded with 0 on the right."""

    tokens_B_S: NDArray[np.int32]


def place_padded(sequences: Sequence[TrainingSequence], order: Sequence[int], budget: int) -> Iterator[Placement]:
    """Cut the sequences, longest first, into runs whose first one's length times their number fits the budget."""
    start = 0
    while start < len(order):
        S = bucket(sequences[order[start]].inputs)
        members = tuple(order[start : start + max(1, budget // S)])
        yield _placed(sequences, members, S)
        start += len(members)


def _placed(sequences: Sequence[TrainingSequence], members: tuple[int, ...], S: int) -> Placement:
    tokens_B_S = np.zeros((len(members), S), dtype=np.int32)
    positions = []
    for row, member in enumerate(members):
        sequence = sequences[member]
        tokens_B_S[row, : sequence.inputs] = (sequence.prompt + sequence.tokens)[:-1]
        positions.append(np.arange(len(sequence.prompt) - 1, sequence.inputs, dtype=np.int32) + row * S)
    return Placement(members, PaddedInputs(tokens_B_S), positions, tokens_B_S.size)


def padded_states(split: SplitModel, layers: AttentionLayers | None, inputs: PaddedInputs) -> mx.array:
    """Hidden states of all positions, (B * S, D). Causal models do not see the padding: it comes after every token.

    layers: where they are known, `LayerKeys` stand in for caches, as in the other layouts.
    """
    keys = None if layers is None else [LayerKeys() for _ in range(layers.caches)]
    hidden_B_S_D = split.blocks(mx.array(inputs.tokens_B_S), keys)
    return hidden_B_S_D.reshape(-1, hidden_B_S_D.shape[-1])
