"""Make a base model trainable: install low-rank layers through mlx-lm, or open every weight."""

from __future__ import annotations

import difflib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from msgspec import Struct

from protocols.adapter import AdapterConfig, LoRAParameters
from protocols.errors import ModelError
from protocols.profile import PolicySection

LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


class AdaptedModule(Struct, frozen=True, kw_only=True):
    """One place of the model where an adapter sits: `parent[key]` is `adapted`, and was `base`."""

    parent: Any
    key: Any
    base: nn.Module
    adapted: nn.Module


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer holds packed weights."""
    return any("scales" in module for _, module in model.named_modules())


def install_adapter(
    model: nn.Module, section: PolicySection, *, seed: int
) -> tuple[AdapterConfig, tuple[AdaptedModule, ...]]:
    """Freeze the base and put low-rank layers over its linear ones: y = W x + scale (x A) B, B = 0 at first.

    Low-rank adaptation, arXiv:2106.09685, with mlx-lm's layers and absolute scale; over packed weights it is QLoRA,
    arXiv:2305.14314. Equal seeds give equal initial adapters; the calling thread's random state is seeded on the way.
    Raises `ModelError` where a target module does not exist or nothing would be trained.
    """
    blocks = model.layers
    if section.num_layers == 0 or section.num_layers > len(blocks):
        raise ModelError(f"policy.num_layers = {section.num_layers}: the model has {len(blocks)} blocks (-1 = all)")
    keys = _resolve_targets(blocks, section.target_modules)
    parameters = LoRAParameters(rank=section.rank, scale=section.effective_scale, dropout=section.dropout, keys=keys)
    before = dict(model.named_modules())
    model.freeze()
    mx.random.seed(seed)
    config = {"rank": parameters.rank, "scale": parameters.scale, "dropout": parameters.dropout, "keys": set(keys)}
    try:
        linear_to_lora_layers(model, section.num_layers, config)
    except ValueError as error:
        raise ModelError(f"this architecture cannot take an adapter: {error}") from error
    adapted = _replaced_modules(model, before)
    if not adapted:
        raise ModelError(f"no module of policy.target_modules lies in the last {section.num_layers} blocks")
    model.eval()
    return AdapterConfig(fine_tune_type="lora", num_layers=section.num_layers, lora_parameters=parameters), adapted


def open_all_weights(model: nn.Module) -> AdapterConfig:
    """Make every floating parameter trainable. Raises `ModelError` on a quantised base: packed weights do not learn."""
    if is_quantized(model):
        raise ModelError("the base is quantised, so adapters only: use policy.kind = lora, or model.dequantize = true")

    def freeze_integers(_: str, module: nn.Module) -> None:
        arrays = {key: value for key, value in module.items() if isinstance(value, mx.array)}
        module.freeze(
            recurse=False, keys=[key for key, value in arrays.items() if not mx.issubdtype(value.dtype, mx.floating)]
        )

    model.apply_to_modules(freeze_integers)
    model.eval()
    return AdapterConfig(fine_tune_type="full", num_layers=-1)


def linear_modules(blocks: list[nn.Module]) -> tuple[str, ...]:
    """Block-relative names of all linear layers, embeddings not among them; sorted."""
    names = {
        name
        for block in blocks
        for name, module in block.named_modules()
        if name and (hasattr(module, "to_lora") or isinstance(module, LINEAR))
    }
    return tuple(sorted(names))


def _resolve_targets(blocks: list[nn.Module], targets: tuple[str, ...]) -> tuple[str, ...]:
    """Names as mlx-lm wants them; a short name such as `q_proj` stands for every module that ends in it."""
    available = linear_modules(blocks)
    if not targets:
        return available
    chosen: set[str] = set()
    for target in targets:
        matching = {name for name in available if name == target or name.endswith(f".{target}")}
        if not matching:
            raise ModelError(f"policy.target_modules: no linear layer named {target}; {_nearest(target, available)}")
        chosen |= matching
    return tuple(sorted(chosen))


def _nearest(target: str, available: tuple[str, ...]) -> str:
    full = {name.rpartition(".")[2]: name for name in available}
    close = difflib.get_close_matches(target.rpartition(".")[2], full, n=1, cutoff=0.0)
    return f"did you mean {full[close[0]]}? (there are: {', '.join(available)})" if close else "the model has none"


def _replaced_modules(model: nn.Module, before: dict[str, nn.Module]) -> tuple[AdaptedModule, ...]:
    found = []
    for name, module in model.named_modules():
        base = before.get(name)
        if base is not None and base is not module:
            parent, key = locate(model, name)
            found.append(AdaptedModule(parent=parent, key=key, base=base, adapted=module))
    return tuple(found)


def locate(model: nn.Module, path: str) -> tuple[Any, Any]:
    """The dictionary or list that holds what `path` names, and its key there."""
    *outer, last = path.split(".")
    node: Any = model
    for part in outer:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(last) if isinstance(node, list) else last
