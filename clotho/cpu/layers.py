"""Put the layers of this package into a model."""

from __future__ import annotations

import sys

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from clotho.cpu import gates, low_rank, rotation
from clotho.cpu.low_rank import LowRankLinear
from clotho.cpu.norms import Norm
from clotho.cpu.rotation import Rotation


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def suit(model: nn.Module) -> None:
    """Let a model and its adapter compute as this package does: gates, norms, rotations, low-rank layers. Not on a GPU.

    Frozen weights are laid out by inputs, one layer after the other: their values and shapes stay. Modules stay the
    same objects. Gates are functions that mlx-lm's models import by name: they change in all of its modules loaded so
    far, for serving and training alike.
    """
    if not on_cpu():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{base.__package__}.") and vars(module).get("swiglu") is gates.original:
            vars(module)["swiglu"] = gates.swiglu
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = Norm
        elif rotation.takes(module):
            module.__class__ = Rotation
        elif low_rank.takes(module):
            module.__class__ = LowRankLinear
        elif type(module) is nn.Linear and not module.trainable_parameters():
            module.weight = by_inputs(module.weight)
            mx.eval(module.weight)


def by_inputs(weight: mx.array) -> mx.array:
    """The same matrix, (outputs, inputs), with the weights of an input side by side.

    Else every product would bring them into this order first, which costs where rows are few.
    """
    return mx.contiguous(weight.T).T
