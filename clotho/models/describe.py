"""What a loaded model is, in numbers, read from its arrays and its configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from clotho.models.parameters import flat
from protocols.errors import ModelError
from protocols.summary import PolicyDescription

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
HIDDEN_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "model_dim")
UNSTATED_CONTEXT = 32_768
"""Context of a model whose configuration states none, as state-space models do."""


def setting(config: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    """The first of `keys` that the configuration, or its `text_config`, states as a positive whole number."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            value = section.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def context_length(config: dict[str, Any]) -> int:
    """Tokens of prompt and completion together; `UNSTATED_CONTEXT` where the configuration does not say."""
    return setting(config, CONTEXT_KEYS) or UNSTATED_CONTEXT


def describe_model(model: nn.Module, config: dict[str, Any]) -> PolicyDescription:
    """Describe a model with its adapter installed, if it has one. Raises `ModelError` if its vocabulary is unknown."""
    vocab_size = setting(config, ("vocab_size",))
    if vocab_size is None:
        raise ModelError("the model's config.json states no vocab_size")
    trainable = sum(array.size for array in flat(model.trainable_parameters()).values())
    total, bits = _parameters(model)
    adapter = sum(array.size for array in _adapter_arrays(model).values())
    return PolicyDescription(
        architecture=str(config.get("model_type", type(model).__module__.rsplit(".", 1)[-1])),
        parameters=total - adapter,
        trainable_parameters=trainable,
        bytes=sum(array.nbytes for array in flat(model.parameters()).values()),
        quantization_bits=bits,
        dtype=_computing_type(model),
        layers=len(model.layers),
        hidden_size=setting(config, HIDDEN_KEYS) or 0,
        vocab_size=vocab_size,
        context_length=context_length(config),
    )


def _adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Low-rank matrices, and DoRA's magnitudes, by name."""
    return {
        f"{name}.{key}": module[key]
        for name, module in model.named_modules()
        if "lora_a" in module
        for key in ("lora_a", "lora_b", "m")
        if isinstance(module.get(key), mx.array)
    }


def _parameters(model: nn.Module) -> tuple[int, int | None]:
    """Number of weights the arrays stand for, and the commonest number of bits they are packed in."""
    total = 0
    bits: Counter[int] = Counter()
    for _, module in model.named_modules():
        own = {key: array for key, array in module.items() if isinstance(array, mx.array) and key[0] != "_"}
        packed = "scales" in own and hasattr(module, "bits")
        if packed:
            weights = own["weight"].size * 32 // module.bits
            bits[module.bits] += weights
            total += weights + (own["bias"].size if "bias" in own else 0)
        else:
            total += sum(array.size for array in own.values())
    return total, bits.most_common(1)[0][0] if bits else None


def _computing_type(model: nn.Module) -> str:
    """The type of most floating weights that belong to the base."""
    sizes: Counter[str] = Counter()
    adapter = _adapter_arrays(model).keys()
    for name, array in flat(model.parameters()).items():
        if mx.issubdtype(array.dtype, mx.floating) and name not in adapter:
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0] if sizes else "unknown"
