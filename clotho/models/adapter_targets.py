"""Which linear layers take an adapter, and of which rank: names of a profile resolved against the model."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from clotho.config.schema import PolicySection
from protocols.errors import ModelError

LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


def linear_modules(blocks: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """All linear layers of the blocks by block-relative name, sorted; embeddings are not among them.

    Where blocks share a name, the narrowest of its layers stands for them.
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
    """The smaller of a linear layer's widths, in and out: the rank that its weight has at most."""
    width_out, width_in = module.weight.shape[-2:]
    return int(min(width_out, width_in * 32 // module.bits if "scales" in module else width_in))


def module_ranks(blocks: Sequence[nn.Module], section: PolicySection) -> dict[str, int]:
    """Rank of every module that takes an adapter, by block-relative name, in the order of the names.

    A short name such as `q_proj` stands for every module that ends in it. Raises `ModelError`, in one line with the
    nearest name, for a name that no linear layer of `blocks` has, and for a rank of `policy.ranks` that is larger
    than its module's smaller side, given twice, or of a module that `policy.target_modules` leaves out.
    """
    available = linear_modules(blocks)
    targets: set[str] = set(available)
    if section.target_modules:
        targets = set().union(
            *(_matching(name, available, key="policy.target_modules") for name in section.target_modules)
        )
    own: dict[str, int] = {}
    for entry in section.ranks:
        name, _, rank = entry.partition("=")
        chosen = _matching(name, available, key="policy.ranks") & targets
        if not chosen:
            raise ModelError(f"policy.ranks: {entry} has no effect, for policy.target_modules leaves {name} out")
        for module in sorted(chosen):
            if module in own:
                raise ModelError(f"policy.ranks: {entry} gives {module} a second rank, beside {own[module]}")
            if int(rank) > smaller_side(available[module]):
                limit = smaller_side(available[module])
                raise ModelError(f"policy.ranks: {entry} is more than the smaller side of {module}, which is {limit}")
            own[module] = int(rank)
    return {name: own.get(name, section.rank) for name in sorted(targets)}


def refuse_without_dora(modules: dict[str, nn.Module]) -> None:
    """Raise `ModelError`, in one line, where mlx-lm has no DoRA layer for one of `modules`.

    It has none for experts and fused projections, and where 32 is no multiple of the bits of packed weights (3, 5, 6)
    its layer takes them for narrower than they are.
    """
    way_out = "leave it out of policy.target_modules, or use policy.kind = lora"
    for name, module in modules.items():
        if hasattr(module, "to_lora") or not isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            raise ModelError(f"policy.kind = dora: mlx-lm has no DoRA for {name}, a {type(module).__name__}; {way_out}")
        if "scales" in module and 32 % module.bits:
            packed = f"{module.bits}-bit weights ({name})"
            raise ModelError(f"policy.kind = dora: mlx-lm has no DoRA over {packed}; {way_out}")


def _matching(target: str, available: Iterable[str], *, key: str) -> set[str]:
    matching = {name for name in available if name == target or name.endswith(f".{target}")}
    if not matching:
        nearest = _nearest(target, available)
        raise ModelError(f"{key}: no linear layer named {target} in the blocks that are trained; {nearest}")
    return matching


def _nearest(target: str, available: Iterable[str]) -> str:
    full = {name.rpartition(".")[2]: name for name in available}
    close = difflib.get_close_matches(target.rpartition(".")[2], full, n=1, cutoff=0.0)
    return f"did you mean {full[close[0]]}? (there are: {', '.join(available)})" if close else "they have none"
