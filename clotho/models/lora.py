"""Make a base model trainable: install LoRA or DoRA layers of mlx-lm, or unfreeze weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.utils import linear_to_lora_layers
from msgspec import Struct

from clotho.models.experts import EXPERT_LINEAR, configuration_of, experts_per_token, router_names
from clotho.models.module_calls import Call, watched_calls
from clotho.models.parameters import flat, locate
from clotho.settings.model import AdapterMethod, Dora
from protocols.checkpoint import AdapterConfig, LoRAParameters
from protocols.errors import ModelError, nearest

LINEAR = (nn.Linear, nn.QuantizedLinear, *EXPERT_LINEAR)


def linear_modules(blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the linear layers of blocks by block-relative name, sorted; of layers with one name, the narrowest."""
    found: dict[str, nn.Module] = {}
    for block in blocks:
        for name, module in block.named_modules():
            if not name or not (hasattr(module, "to_lora") or isinstance(module, LINEAR)):
                continue
            if name not in found or smaller_side(module) < smaller_side(found[name]):
                found[name] = module
    return dict(sorted(found.items()))


def smaller_side(module: nn.Module) -> int:
    """Return the smaller of a linear layer's input and output widths, which is the maximum rank of the weight."""
    return min(widths(module))


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the input and output widths of a linear layer, quantized or not; of one expert in a mixture."""
    width_out, width_in = module.weight.shape[-2:]
    return width_in * 32 // module.bits if "scales" in module else width_in, width_out


def module_ranks(blocks: Sequence[nn.Module], method: AdapterMethod, *, experts_per_token: int = 1) -> dict[str, int]:
    """Return the rank of every module that gets an adapter, by block-relative name, sorted.

    By default, all linear layers but routers get one. Every expert has the rank of other layers divided by the number
    of experts per token, at least 1, unless `policy.method.ranks` names it: the experts of a token together have the
    rank of a dense layer. A short name such as `q_proj` selects every module whose name ends in it. Raises
    `ModelError`, with the nearest name, if no linear layer of `blocks` has a given name. Raises `ModelError` if a rank
    of `policy.method.ranks` exceeds the smaller side of its module, is given twice, or belongs to a module outside
    `policy.method.target_modules`.
    """
    available = linear_modules(blocks)
    targets: set[str] = set(available) - router_names(available)
    if method.target_modules:
        targets = set().union(
            *(_matching(name, available, key="policy.method.target_modules") for name in method.target_modules)
        )
    own: dict[str, int] = {}
    for entry in method.ranks:
        name, _, rank = entry.partition("=")
        chosen = _matching(name, available, key="policy.method.ranks") & targets
        if not chosen:
            raise ModelError(
                f"policy.method.ranks: {entry} has no effect: policy.method.target_modules does not include {name}"
            )
        for module in sorted(chosen):
            if module in own:
                raise ModelError(
                    f"policy.method.ranks: {entry} sets the rank of {module} twice, first to {own[module]}"
                )
            if int(rank) > smaller_side(available[module]):
                limit = smaller_side(available[module])
                raise ModelError(f"policy.method.ranks: {entry} exceeds the smaller side of {module}, which is {limit}")
            own[module] = int(rank)
    of_expert = max(1, method.rank // experts_per_token)
    defaults = {name: of_expert if isinstance(available[name], EXPERT_LINEAR) else method.rank for name in targets}
    return dict(sorted((defaults | own).items()))


def refuse_without_dora(modules: dict[str, nn.Module]) -> None:
    """Raise `ModelError` if mlx-lm has no DoRA layer for one of `modules`.

    mlx-lm has no DoRA layer for experts and fused projections. For weights of 3, 5 or 6 bits its DoRA layer computes a
    wrong input width, because 32 is not a multiple of the number of bits.
    """
    way_out = "remove it from policy.method.target_modules, or use policy.method = lora"
    for name, module in modules.items():
        if hasattr(module, "to_lora") or not isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            raise ModelError(
                f"policy.method = dora: mlx-lm has no DoRA layer for {name} ({type(module).__name__}); {way_out}"
            )
        if "scales" in module and 32 % module.bits:
            packed = f"{module.bits}-bit weights ({name})"
            raise ModelError(f"policy.method = dora: mlx-lm has no DoRA layer for {packed}; {way_out}")


def _matching(target: str, available: Iterable[str], *, key: str) -> set[str]:
    matching = {name for name in available if name == target or name.endswith(f".{target}")}
    if not matching:
        hint = _nearest(target, available)
        raise ModelError(f"{key}: the trained blocks have no linear layer named {target}; {hint}")
    return matching


def _nearest(target: str, available: Iterable[str]) -> str:
    full = {name.rpartition(".")[2]: name for name in available}
    close = nearest(target.rpartition(".")[2], full, cutoff=0.0)
    return f"did you mean {full[close]}? (there are: {', '.join(available)})" if close else "they have no linear layer"


class AdaptedModule(Struct, frozen=True, kw_only=True):
    """A module with an adapter. `parent[key]`, named `name`, was `base` and is now `adapted`."""

    name: str
    parent: Any
    key: Any
    base: nn.Module
    adapted: nn.Module


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer has quantized weights."""
    return any("scales" in module for _, module in model.named_modules())


TOKEN_LOOPS = ("bailing_moe_linear", "jamba", "mamba", "recurrent_gemma", "rwkv7")
"""Modules of mlx-lm whose recurrent layers are loops over tokens; `falcon_mamba` is in `mamba`."""


def _refuse_token_loops(model: nn.Module) -> None:
    name = type(model).__module__.rpartition(".")[2]
    if name in TOKEN_LOOPS:
        raise ModelError(
            f"models of the architecture {name} cannot be trained: mlx-lm computes their recurrent layers token by "
            "token, and the memory of an update grows with the square of the length; use a model with attention, the "
            "gated delta rule, Mamba 2 or short convolutions, such as qwen3, qwen3_5, mamba2 or lfm2"
        )


def install_adapter(
    model: nn.Module, method: AdapterMethod, *, seed: int
) -> tuple[AdapterConfig, tuple[AdaptedModule, ...]]:
    """Freeze the base model, install adapters, and make embeddings and head trainable if the method says so.

    LoRA (arXiv:2106.09685): y = W x + scale (x A) B, with B = 0 initially. DoRA (arXiv:2402.09353, section 4.3): as
    LoRA, and each output is multiplied by m / |W + scale (A B)^T| of its row, with the trained magnitude m and no
    gradient through the norm. Both use the layers of mlx-lm and an absolute scale. LoRA on quantized weights is QLoRA
    (arXiv:2305.14314).

    Equal seeds give equal initial adapters; seeds the random state of the calling thread. Raises `ModelError` if a
    target module does not exist, if mlx-lm has no adapter layer for a target module, if no weight would be trained, or
    for `TOKEN_LOOPS`.
    """
    _refuse_token_loops(model)
    blocks = model.layers
    if method.num_layers == 0 or method.num_layers > len(blocks):
        raise ModelError(
            f"policy.method.num_layers = {method.num_layers}: the model has {len(blocks)} blocks (-1 = all)"
        )
    trained = blocks[-max(method.num_layers, 0) :]
    ranks = module_ranks(trained, method, experts_per_token=experts_per_token(configuration_of(model)))
    if not ranks:
        raise ModelError("no trained block has a linear layer for an adapter")
    if isinstance(method, Dora):
        refuse_without_dora({name: module for name, module in linear_modules(trained).items() if name in ranks})
    beside = _weights_beside(model, method)
    before = dict(model.named_modules())
    model.freeze()
    mx.random.seed(seed)
    _install(model, method, ranks)
    for module in beside.values():
        module.unfreeze(recurse=False)
    model.eval()
    return _configuration(method, ranks, beside), _replaced_modules(model, before)


def open_all_weights(model: nn.Module) -> AdapterConfig:
    """Make every floating-point parameter trainable. Raises `ModelError` for quantized models and `TOKEN_LOOPS`."""
    _refuse_token_loops(model)
    if is_quantized(model):
        raise ModelError(
            "quantized weights cannot be trained in full: use policy.method = lora, model.dequantize = true, or no "
            "model.quantize"
        )

    def freeze_integers(_: str, module: nn.Module) -> None:
        arrays = {key: value for key, value in module.items() if isinstance(value, mx.array)}
        module.freeze(
            recurse=False, keys=[key for key, value in arrays.items() if not mx.issubdtype(value.dtype, mx.floating)]
        )

    model.apply_to_modules(freeze_integers)
    model.eval()
    return AdapterConfig(fine_tune_type="full", num_layers=-1)


def fused_weights(adapted: Iterable[AdaptedModule]) -> dict[str, mx.array]:
    """Return the fused weights of adapted modules by name, in the type of the base weights, not evaluated."""
    return {f"{one.name}.weight": one.adapted.fuse().weight.astype(one.base.weight.dtype) for one in adapted}


def _weights_beside(model: nn.Module, method: AdapterMethod) -> dict[str, nn.Module]:
    """Return the modules whose weights are trained in full beside the adapter, by name."""
    if not (method.train_embeddings or method.train_head):
        return {}
    if is_quantized(model):
        key = "policy.method.train_embeddings" if method.train_embeddings else "policy.method.train_head"
        raise ModelError(f"{key}: quantized weights cannot be trained in full; set model.dequantize = true")
    return token_weights(model, embeddings=method.train_embeddings, head=method.train_head)


def _install(model: nn.Module, method: AdapterMethod, ranks: dict[str, int]) -> None:
    """Install mlx-lm's layers over the modules in `ranks`, one rank after another."""
    for rank in sorted(set(ranks.values())):
        keys = {name for name, own in ranks.items() if own == rank}
        config = {"rank": rank, "scale": method.effective_scale, "dropout": method.dropout, "keys": keys}
        try:
            linear_to_lora_layers(model, method.num_layers, config, use_dora=isinstance(method, Dora))
        except ValueError as error:
            raise ModelError(f"this architecture cannot take an adapter: {error}") from error


def _configuration(method: AdapterMethod, ranks: dict[str, int], beside: dict[str, nn.Module]) -> AdapterConfig:
    largest = max(ranks.values())
    weights = [f"{name}.{weight}" for name, module in beside.items() for weight in flat(module.trainable_parameters())]
    return AdapterConfig(
        fine_tune_type="dora" if isinstance(method, Dora) else "lora",
        num_layers=method.num_layers,
        lora_parameters=LoRAParameters(
            rank=largest, scale=method.effective_scale, dropout=method.dropout, keys=tuple(ranks)
        ),
        ranks={name: rank for name, rank in ranks.items() if rank < largest},
        trained_weights=tuple(sorted(weights)),
    )


def _replaced_modules(model: nn.Module, before: dict[str, nn.Module]) -> tuple[AdaptedModule, ...]:
    found = []
    for name, module in model.named_modules():
        base = before.get(name)
        if base is not None and base is not module:
            parent, key = locate(model, name)
            found.append(AdaptedModule(name=name, parent=parent, key=key, base=base, adapted=module))
    return tuple(found)


def token_weights(model: nn.Module, *, embeddings: bool, head: bool) -> dict[str, nn.Module]:
    """Return the token embeddings and the output head, by name.

    Their names differ between architectures, so the modules are found by recording one call of the model. The call is
    not evaluated and reads no weights. embeddings, head: whether to return each. Raises `ModelError` if the model has
    no such module, for example no head because it is tied to the embeddings.
    """
    inside = {id(module) for block in model.layers for module in block.modules()}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module) not in inside
    }
    tokens_1_2 = mx.zeros((1, 2), dtype=mx.int32)
    with watched_calls(candidates.values()) as calls:
        logits_1_2_V = model(tokens_1_2)
    looked_up = [call.module for call in calls if isinstance(call.module, nn.Embedding) and call.given is tokens_1_2]
    ends = [call.module for call in calls if isinstance(call.module, nn.Linear) and _ends_in(call, logits_1_2_V)]
    if embeddings and not looked_up:
        raise ModelError("policy.method.train_embeddings: this architecture has no embedding that reads the tokens")
    if head and not ends:
        raise ModelError(
            "policy.method.train_head: the head of this model is tied to the embeddings; "
            "policy.method.train_embeddings = true trains both"
        )
    wanted = [*(looked_up if embeddings else ()), *(ends[-1:] if head else ())]
    return {name: module for name, module in candidates.items() if any(module is one for one in wanted)}


def _ends_in(call: Call, logits_1_2_V: mx.array) -> bool:
    return isinstance(call.result, mx.array) and call.result.shape[-1] == logits_1_2_V.shape[-1]
