"""Parameter trees as flat dictionaries, `model.layers.0.self_attn.q_proj.lora_a` -> array, and back."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

Parameters = dict[str, Any]
"""Nested dictionaries and lists of arrays, as `nn.Module.trainable_parameters()` gives them; branches may be empty."""


def flat(tree: Parameters) -> dict[str, mx.array]:
    """Name the arrays of a nested tree by their path, in the order of the names."""
    leaves = tree_flatten(tree)
    assert isinstance(leaves, list)
    return dict(sorted(leaves, key=lambda leaf: leaf[0]))


def nested(arrays: dict[str, mx.array]) -> Parameters:
    """Rebuild the nested tree of `flat`, lists of layers included. Arrays are shared, not copied."""
    tree: Parameters = tree_unflatten(list(arrays.items())) if arrays else {}
    return tree
