"""Quantization of a full-precision base model at load, so that QLoRA needs no prepared model.

The result equals that of `mlx_lm.convert -q` bit for bit: the weights are cast to the type that the configuration
states, and every layer that mlx-lm quantizes is quantized in this type. The compute type applies afterwards, as with a
model that is stored in quantized form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from clotho.models.model_files import BITS, GROUP_SIZES
from clotho.settings.model import QuantizeAtLoad
from protocols.checkpoint import BaseQuantization
from protocols.errors import ModelError

DEFAULTS = {"affine": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Bits and group size of each mode, as in mlx-lm."""

STORED_TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def quantization_of(section: QuantizeAtLoad) -> BaseQuantization:
    """Return the settings with the defaults of the mode. Raises ModelError for values that the mode does not have."""
    bits, group_size = DEFAULTS[section.mode]
    chosen = BaseQuantization(
        bits=bits if section.bits is None else section.bits,
        group_size=group_size if section.group_size is None else section.group_size,
        mode=section.mode,
    )
    for key, value, allowed in (
        ("bits", chosen.bits, BITS[chosen.mode]),
        ("group_size", chosen.group_size, GROUP_SIZES[chosen.mode]),
    ):
        if value not in allowed:
            raise ModelError(
                f"model.quantize.{key} = {value}: model.quantize.mode = {chosen.mode} supports "
                f"{', '.join(map(str, allowed))}"
            )
    return chosen


def quantize_base(model: nn.Module, config: dict[str, Any], section: QuantizeAtLoad, *, path: str) -> None:
    """Quantize the layers that mlx-lm quantizes; nothing is evaluated.

    path: the model, for messages. Raises ModelError if a layer is quantized already, or if the group size does not
    divide the inputs of a layer.
    """
    settings = quantization_of(section)
    stored = [module for _, module in model.named_modules() if "scales" in module]
    if stored:
        found = f" ({stored[0].bits} bits)" if hasattr(stored[0], "bits") else ""
        raise ModelError(f"model.quantize: the model {path} is already quantized{found}; remove [model.quantize]")
    _cast_as_stored(model, config)
    refused: dict[str, int] = {}
    wanted = getattr(model, "quant_predicate", None)
    nn.quantize(
        model,
        settings.group_size,
        settings.bits,
        mode=settings.mode,
        class_predicate=_predicate(wanted, settings.group_size, refused),
    )
    if refused:
        name, width = next(iter(refused.items()))
        more = f" and {len(refused) - 1} more layers" if len(refused) > 1 else ""
        fitting = [size for size in GROUP_SIZES[settings.mode] if not any(w % size for w in refused.values())]
        advice = f"use {' or '.join(map(str, fitting))}" if fitting else "use another mode, or no quantization"
        raise ModelError(
            f"model.quantize.group_size = {settings.group_size} does not divide the {width} inputs of {name}{more}: "
            f"{advice}"
        )


def _predicate(
    wanted: Callable[[str, nn.Module], bool | dict[str, Any]] | None, group_size: int, refused: dict[str, int]
) -> Callable[[str, nn.Module], bool | dict[str, Any]]:
    """Return how each layer is quantized, if at all. refused: receives the inputs of layers that do not fit."""

    def choose(name: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        chosen = True if wanted is None else wanted(name, module)
        if chosen and module.weight.shape[-1] % group_size:
            refused[name] = int(module.weight.shape[-1])
            return False
        return chosen

    return choose


def _cast_as_stored(model: nn.Module, config: dict[str, Any]) -> None:
    """Cast floating parameters to the type that the configuration states, if it states one."""
    text = config.get("text_config")
    stated = config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    dtype = STORED_TYPES.get(stated) if isinstance(stated, str) else None
    if dtype is None:
        return
    casts = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if casts(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast, model.parameters()))
