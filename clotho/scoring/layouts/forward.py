"""Hidden states of a micro-batch in any layout, and the check that a layout does not change a model's results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from clotho.models.attention import AttentionLayers, ResetState, install_cache_attention
from clotho.models.head import Blocks, SplitModel
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.layouts.rows import PackedInputs, PaddedInputs, packed_states, padded_states
from clotho.scoring.layouts.shared_prefix import SharedInputs, shared_states
from clotho.scoring.sequences import TrainingSequence, scored_only
from protocols.errors import ModelError


def hidden_states(blocks: Blocks, layers: AttentionLayers | None, inputs: NamedTuple, offset: int = 0) -> mx.array:
    """Compute flat hidden states, (positions, D). offset: first position of packed rows. Raises ValueError."""
    if isinstance(inputs, PaddedInputs):
        return padded_states(blocks, layers, inputs)
    if layers is not None and isinstance(inputs, PackedInputs):
        return packed_states(blocks, layers, inputs, offset)
    if layers is not None and isinstance(inputs, SharedInputs):
        return shared_states(blocks, layers, inputs)
    raise ValueError(f"this model cannot compute hidden states of {type(inputs).__name__}")


MASK_AXES = (None, 4, 5)
"""Values of `AttentionLayers.mask_axes`, in the order in which they are tried."""

TEST_LENGTHS = ((3, (4, 2, 1)), (1, (3,)), (2, (4, 1, 2)))
"""Lengths of test prompts and their completions: unequal, so that confused rows or heads change the result."""

FAR_OFFSET = 2**17
"""Packed rows must give the same results from this position as from 0, i.e. depend on differences of positions only."""

COARSE_TOLERANCE = 5e-2
"""Relative difference of logits that counts as rounding: for 16-bit types, and for any type at `FAR_OFFSET`."""

UNLIMITED_BUDGET = 10_000

CANNOT_RESET = "a recurrent layer cannot reset its state between the sequences of a row"

UNSUPPORTED = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""Exceptions of models that take no caches, or use attributes that `LayerKeys` does not have."""


def check_layout(model: nn.Module, split: SplitModel | None, vocab_size: int, *, layout: str) -> AttentionLayers:
    """Check that the logits of a layout equal those of padded rows; return how the blocks take keys and masks.

    Raises ModelError if they differ: for absolute positions or recurrent layers that cannot be reset in packed rows,
    for recurrent layers that do not stop at the padding of a shared prompt, or for models whose blocks and head cannot
    be separated.
    """
    install_cache_attention()
    reasons: dict[int | None, str] = {}
    for mask_axes in MASK_AXES:
        try:
            caches = _caches(model)
            layers = AttentionLayers(caches, mask_axes, _gap(model) if any(caches) else 0)
            difference = _difference(split, layers, vocab_size, layout)
        except UNSUPPORTED as error:
            cannot_reset = ResetState.__name__ in str(error)
            reasons[mask_axes] = CANNOT_RESET if cannot_reset else str(error)
            continue
        if difference is None:
            return layers
        reasons[mask_axes] = difference
    raise ModelError(f'learner.layout = "{layout}" does not suit this model: {reasons[4]}; choose "padded" or "auto"')


def _gap(model: nn.Module) -> int:
    """Return the `gap` of `AttentionLayers` for a model with recurrent layers."""
    return max([1, *(module.weight.shape[1] - 1 for module in model.modules() if isinstance(module, nn.Conv1d))])


def _caches(model: nn.Module) -> tuple[Any, ...]:
    """Return the `caches` of `AttentionLayers`. Raises ValueError for another kind of cache."""

    def arrays(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return tuple(map(arrays, cache.caches))
        if type(cache) not in (KVCache, RotatingKVCache, ArraysCache):
            raise ValueError(f"a layer has a state other than keys and values ({type(cache).__name__})")
        return len(cache.cache) if isinstance(cache, ArraysCache) else 0

    return tuple(map(arrays, make_prompt_cache(model)))


def _difference(split: SplitModel | None, layers: AttentionLayers, vocab_size: int, layout: str) -> str | None:
    """Describe how the logits differ from those of padded rows; None if only by rounding."""
    if split is None:
        raise ValueError("its blocks and head cannot be separated")
    sequences = _sequences(vocab_size)
    expected_N_V = _logits(split, None, sequences, "padded")
    size = _rms(expected_N_V - mx.mean(expected_N_V, axis=-1, keepdims=True))
    rounding = 1e-4 if expected_N_V.dtype == mx.float32 else COARSE_TOLERANCE
    offsets = ((0, rounding), (FAR_OFFSET, COARSE_TOLERANCE)) if layout == "packed" else ((0, rounding),)
    for offset, tolerance in offsets:
        difference = _rms(_logits(split, layers, sequences, layout, offset=offset) - expected_N_V)
        if not difference <= tolerance * size:
            return f"its logits differ by {difference / size:.1%} in rows that begin at position {offset}"
    return None


def _rms(logits_N_V: mx.array) -> float:
    """Return the root mean square."""
    return float(np.array(mx.sqrt(mx.mean(mx.square(logits_N_V.astype(mx.float32))))))


def _logits(
    split: SplitModel,
    layers: AttentionLayers | None,
    sequences: Sequence[TrainingSequence],
    layout: str,
    *,
    offset: int = 0,
) -> mx.array:
    """Compute the logits before every completion token, (N, V), by sequence. offset: first position of packed rows."""
    (micro,) = build_micro_batches(sequences, layout=layout, budget=UNLIMITED_BUDGET)
    real = sum(len(sequence.tokens) for sequence in sequences)
    member_N = np.asarray(micro.members)[micro.table.sequence_N[:real]]
    position_N = micro.table.position_N[:real][np.argsort(member_N, kind="stable")]
    hidden_P_D = hidden_states(split.blocks, layers, micro.inputs, offset)
    return split.head(hidden_P_D[mx.array(position_N)])


def _sequences(vocab_size: int) -> list[TrainingSequence]:
    numbers = count(3, 7)

    def tokens(length: int) -> list[int]:
        return [next(numbers) % vocab_size for _ in range(length)]

    prompts = [(tokens(prompt), completions) for prompt, completions in TEST_LENGTHS]
    return [scored_only(prompt, tokens(length)) for prompt, completions in prompts for length in completions]
