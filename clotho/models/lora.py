"""Make a base model trainable: install LoRA or DoRA layers of mlx-lm, or unfreeze weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from msgspec import Struct

from clotho.config.nearest import nearest
from clotho.config.sections_data import AdapterMethod, Dora
from clotho.models.parameters import flat, locate
from protocols.checkpoint import AdapterConfig, LoRAParameters
from protocols.errors import ModelError

LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


def linear_modules(blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return all linear layers of the blocks by block-relative name, sorted, without embeddings.

    If several blocks have a layer of the same name, the narrowest one is returned.
    """
    found: dict[str, nn.Module] = {}
    for block in blocks:
        for name, module in block.named_modules():
            if not name or not (hasattr(module, "to_lora") or isinstance(module, LINEAR)):
                continue
            if name not in found or smaller_side(module) < smaller_side(found[name]):
                found[name] = module
    return dict(sorted(found.items()))


def smaller_side(module: nn.Module) -> int:
    """Return the smaller of a linear layer's input and output widths: the maximum rank of its weight."""
    width_out, width_in = module.weight.shape[-2:]
    return int(min(width_out, width_in * 32 // module.bits if "scales" in module else width_in))


def module_ranks(blocks: Sequence[nn.Module], method: AdapterMethod) -> dict[str, int]:
    """Return the rank of every module that gets an adapter, by block-relative name, sorted.

    A short name such as `q_proj` selects every module whose name ends in it. Raises `ModelError`, in one line with the
    nearest name, for a name that no linear layer of `blocks` has, and for a rank of `policy.method.ranks` that is
    larger than its module's smaller side, given twice, or of a module that `policy.method.target_modules` leaves out.
    """
    available = linear_modules(blocks)
    targets: set[str] = set(available)
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
                f"policy.method.ranks: {entry} has no effect, for policy.method.target_modules leaves {name} out"
            )
        for module in sorted(chosen):
            if module in own:
                raise ModelError(f"policy.method.ranks: {entry} gives {module} a second rank, beside {own[module]}")
            if int(rank) > smaller_side(available[module]):
                limit = smaller_side(available[module])
                raise ModelError(
                    f"policy.method.ranks: {entry} is more than the smaller side of {module}, which is {limit}"
                )
            own[module] = int(rank)
    return {name: own.get(name, method.rank) for name in sorted(targets)}


def refuse_without_dora(modules: dict[str, nn.Module]) -> None:
    """Raise `ModelError`, in one line, where mlx-lm has no DoRA layer for one of `modules`.

    It has none for experts and fused projections, and where 32 is no multiple of the bits of packed weights (3, 5, 6)
    its layer takes them for narrower than they are.
    """
    way_out = "leave it out of policy.method.target_modules, or use policy.method = lora"
    for name, module in modules.items():
        if hasattr(module, "to_lora") or not isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            raise ModelError(
                f"policy.method = dora: mlx-lm has no DoRA for {name}, a {type(module).__name__}; {way_out}"
            )
        if "scales" in module and 32 % module.bits:
            packed = f"{module.bits}-bit weights ({name})"
            raise ModelError(f"policy.method = dora: mlx-lm has no DoRA over {packed}; {way_out}")


def _matching(target: str, available: Iterable[str], *, key: str) -> set[str]:
    matching = {name for name in available if name == target or name.endswith(f".{target}")}
    if not matching:
        hint = _nearest(target, available)
        raise ModelError(f"{key}: no linear layer named {target} in the blocks that are trained; {hint}")
    return matching


def _nearest(target: str, available: Iterable[str]) -> str:
    full = {name.rpartition(".")[2]: name for name in available}
    close = nearest(target.rpartition(".")[2], full, cutoff=0.0)
    return f"did you mean {full[close]}? (there are: {', '.join(available)})" if close else "they have none"


class AdaptedModule(Struct, frozen=True, kw_only=True):
    """A module with an adapter: `parent[key]`, named `name`, is `adapted` and was `base`."""

    name: str
    parent: Any
    key: Any
    base: nn.Module
    adapted: nn.Module


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer has quantized weights."""
    return any("scales" in module for _, module in model.named_modules())


def install_adapter(
    model: nn.Module, method: AdapterMethod, *, seed: int
) -> tuple[AdapterConfig, tuple[AdaptedModule, ...]]:
    """Freeze the base, put low-rank layers over its linear ones, and open embeddings and head where asked.

    lora: y = W x + scale (x A) B with B = 0 at first (LoRA, arXiv:2106.09685). dora: the same, and then every output
    scaled to a trained magnitude, m / |W + scale (A B)^T| per row, the norm without gradient (DoRA, arXiv:2402.09353,
    section 4.3). Both with mlx-lm's layers and absolute scale; over packed weights it is QLoRA, arXiv:2305.14314.

    Equal seeds give equal initial adapters; the calling thread's random state is seeded on the way. Raises `ModelError`
    where a target module does not exist, mlx-lm has no such layer for it, or nothing would be trained.
    """
    blocks = model.layers
    if method.num_layers == 0 or method.num_layers > len(blocks):
        raise ModelError(
            f"policy.method.num_layers = {method.num_layers}: the model has {len(blocks)} blocks (-1 = all)"
        )
    trained = blocks[-max(method.num_layers, 0) :]
    ranks = module_ranks(trained, method)
    if not ranks:
        raise ModelError("no block that is trained has a linear layer for an adapter")
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
    """Make every floating parameter trainable. Raises `ModelError` on a quantised base: packed weights do not learn."""
    if is_quantized(model):
        raise ModelError(
            "the base is quantised, so adapters only: use policy.method = lora, or model.dequantize = true"
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
    """Return the weights of plain layers that equal the adapted ones, by name, in the type of their bases; lazy."""
    return {f"{one.name}.weight": one.adapted.fuse().weight.astype(one.base.weight.dtype) for one in adapted}


def _weights_beside(model: nn.Module, method: AdapterMethod) -> dict[str, nn.Module]:
    """Return the modules whose weights are trained in full besides the adapter, by name."""
    if not (method.train_embeddings or method.train_head):
        return {}
    if is_quantized(model):
        key = "policy.method.train_embeddings" if method.train_embeddings else "policy.method.train_head"
        raise ModelError(f"{key}: the base is quantised, and beside packed weights only adapters are trained")
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


class _Call(NamedTuple):
    module: nn.Module
    given: Any
    result: Any


def token_weights(model: nn.Module, *, embeddings: bool, head: bool) -> dict[str, nn.Module]:
    """The embedding modules that look tokens up, and the linear layer that ends in the logits, by name.

    Architectures give them many names, so one call of the model is watched; it is never evaluated, so weights that
    were not read yet stay unread. embeddings, head: which to return. Raises `ModelError` where the model has none of
    its own, as where embeddings and head are tied.
    """
    inside = {id(module) for block in model.layers for module in block.modules()}
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and id(module) not in inside
    }
    tokens_1_2 = mx.zeros((1, 2), dtype=mx.int32)
    with _watched(candidates.values()) as calls:
        logits_1_2_V = model(tokens_1_2)
    looked_up = [call.module for call in calls if isinstance(call.module, nn.Embedding) and call.given is tokens_1_2]
    ends = [call.module for call in calls if isinstance(call.module, nn.Linear) and _ends_in(call, logits_1_2_V)]
    if embeddings and not looked_up:
        raise ModelError("policy.method.train_embeddings: no embedding of this architecture is called with the tokens")
    if head and not ends:
        raise ModelError(
            "policy.method.train_head: this model has no head of its own, its embeddings are the head (tied); "
            "policy.method.train_embeddings = true trains both"
        )
    wanted = [*(looked_up if embeddings else ()), *(ends[-1:] if head else ())]
    return {name: module for name, module in candidates.items() if any(module is one for one in wanted)}


def _ends_in(call: _Call, logits_1_2_V: mx.array) -> bool:
    return isinstance(call.result, mx.array) and call.result.shape[-1] == logits_1_2_V.shape[-1]


@contextmanager
def _watched(modules: Iterable[nn.Module]) -> Iterator[list[_Call]]:
    """Record every call of `modules` inside the context; their class changes for its duration."""
    calls: list[_Call] = []
    plain = [(module, type(module)) for module in modules]
    try:
        for module, cls in plain:
            module.__class__ = _watching(cls, calls)
        yield calls
    finally:
        for module, cls in plain:
            module.__class__ = cls


def _watching(cls: type[Any], calls: list[_Call]) -> type[Any]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = cls.__call__(module, *args, **kwargs)
        calls.append(_Call(module, args[0] if args else None, result))
        return result

    return type(cls.__name__, (cls,), {"__call__": call})
