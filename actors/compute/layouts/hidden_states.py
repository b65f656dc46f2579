"""Hidden states of a micro-batch, whatever its layout."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from actors.compute.head import SplitModel
from actors.compute.layouts.layer_keys import AttentionLayers
from actors.compute.layouts.packed import PackedInputs, packed_states
from actors.compute.layouts.padded import PaddedInputs, padded_states
from actors.compute.layouts.shared_prefix import SharedInputs, shared_states


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
