"""Hidden states of a micro-batch, whatever its layout."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from clotho.models.head import SplitModel
from clotho.models.layer_keys import AttentionLayers
from clotho.scoring.layouts.packed import PackedInputs, packed_states
from clotho.scoring.layouts.padded import PaddedInputs, padded_states
from clotho.scoring.layouts.shared_prefix import SharedInputs, shared_states


def hidden_states(split: SplitModel, layers: AttentionLayers | None, inputs: NamedTuple) -> mx.array:
    """Compute the flat hidden states, (positions, D), that `TokenTable.position_N` counts in.

    layers: see `prove_layout`; packed and shared inputs need them. Raises ValueError where they are missing.
    """
    if isinstance(inputs, PaddedInputs):
        return padded_states(split, layers, inputs)
    if layers is not None and isinstance(inputs, PackedInputs):
        return packed_states(split, layers, inputs)
    if layers is not None and isinstance(inputs, SharedInputs):
        return shared_states(split, layers, inputs)
    raise ValueError(f"no way to compute hidden states of {type(inputs).__name__} with this model")
