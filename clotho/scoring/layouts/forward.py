"""Hidden states of a micro-batch, whatever its layout.

Whether a model computes the same in a layout as in padded rows, found out on a few tokens before any update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from clotho.models.attention import let_caches_attend
from clotho.models.head import SplitModel
from clotho.models.layer_keys import AttentionLayers
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.packed import PackedInputs, packed_states
from clotho.scoring.layouts.padded import PaddedInputs, padded_states
from clotho.scoring.layouts.shared_prefix import SharedInputs, shared_states
from clotho.scoring.sequences import TrainingSequence, scored_only
from protocols.errors import ModelError


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


MASK_AXES = (4, 5)

LENGTHS = ((3, (4, 2, 1)), (1, (3,)), (2, (4, 1, 2)))
"""Of prompts, and of their completions: unequal, so that rows or heads that are mixed up change the result."""

FAR = 2**17
"""A position at which packed rows must give what they give at 0: what depends on more than differences shows there."""

COARSE = 5e-2
"""Relative difference of logits that is still rounding: in 16-bit types, and of rotations at `FAR` in any."""

MORE_THAN_ENOUGH = 10_000

REFUSALS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""What models raise that take no caches, or ask of them what `LayerKeys` has not."""


def prove_layout(model: nn.Module, split: SplitModel | None, vocab_size: int, *, layout: str) -> AttentionLayers:
    """Find out how the blocks take keys and masks, and prove that the layout's logits are those of padded rows.

    Raises ModelError where they are not: for layers with a state other than keys and values, absolute positions (in
    packed rows), or blocks that cannot be told from the head.
    """
    let_caches_attend()
    reasons = []
    for mask_axes in MASK_AXES:
        try:
            layers = AttentionLayers(_caches(model), mask_axes)
            difference = _difference(split, layers, vocab_size, layout)
        except REFUSALS as error:
            reasons.append(str(error))
            continue
        if difference is None:
            return layers
        reasons.append(difference)
    raise ModelError(f'learner.layout = "{layout}" is not for this model: {reasons[0]}; choose "padded" or "auto"')


def _caches(model: nn.Module) -> int:
    """Count the caches that the model makes. Raises ValueError if one holds more than keys and values."""
    caches = make_prompt_cache(model)
    for cache in caches:
        if type(cache) not in (KVCache, RotatingKVCache):
            raise ValueError(f"a layer has a state other than keys and values ({type(cache).__name__})")
    return len(caches)


def _difference(split: SplitModel | None, layers: AttentionLayers, vocab_size: int, layout: str) -> str | None:
    """Say by how much the logits differ from those of padded rows; None: by rounding."""
    if split is None:
        raise ValueError("its blocks cannot be told from its head")
    sequences = _sequences(vocab_size)
    expected_N_V = _logits(split, None, sequences, "padded")
    size = _size(expected_N_V - mx.mean(expected_N_V, axis=-1, keepdims=True))
    rounding = 1e-4 if expected_N_V.dtype == mx.float32 else COARSE
    for offset, tolerance in ((0, rounding), (FAR, COARSE)) if layout == "packed" else ((0, rounding),):
        difference = _size(_logits(split, layers, sequences, layout, offset=offset) - expected_N_V)
        if not difference <= tolerance * size:
            return f"its logits differ by {difference / size:.1%} in rows that begin at position {offset}"
    return None


def _size(logits_N_V: mx.array) -> float:
    """Root mean square."""
    return float(np.array(mx.sqrt(mx.mean(mx.square(logits_N_V.astype(mx.float32))))))


def _logits(
    split: SplitModel,
    layers: AttentionLayers | None,
    sequences: Sequence[TrainingSequence],
    layout: str,
    *,
    offset: int = 0,
) -> mx.array:
    """Logits before every completion token, in the order of the sequences: (N, V). offset: where packed rows begin."""
    (micro,) = build_micro_batches(sequences, layout=layout, budget=MORE_THAN_ENOUGH)
    real = sum(len(sequence.tokens) for sequence in sequences)
    member_N = np.asarray(micro.members)[micro.table.sequence_N[:real]]
    position_N = micro.table.position_N[:real][np.argsort(member_N, kind="stable")]
    if layers is not None and isinstance(micro.inputs, PackedInputs):
        hidden_P_D = packed_states(split, layers, micro.inputs, offset)
    else:
        hidden_P_D = hidden_states(split, layers, micro.inputs)
    return split.head(hidden_P_D[mx.array(position_N)])


def _sequences(vocab_size: int) -> list[TrainingSequence]:
    numbers = count(3, 7)

    def tokens(length: int) -> list[int]:
        return [next(numbers) % vocab_size for _ in range(length)]

    prompts = [(tokens(prompt), completions) for prompt, completions in LENGTHS]
    return [scored_only(prompt, tokens(length)) for prompt, completions in prompts for length in completions]
