"""Put the layers of this package into a model.

The root mean square norm while it is trained through.

The gate of a feed-forward layer, silu(gate) * up, and its gradient.

A low-rank layer over a linear one: the scale where numbers are few, and sums inside matrix products.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base
from mlx_lm.tuner.lora import LoRALinear

from clotho.cpu.attention import Rotation, is_replaceable_rope
from clotho.cpu.exponential import exp


class Norm(nn.RMSNorm):
    """A norm of mlx's that knows its gradient."""

    def __call__(self, x: mx.array) -> mx.array:
        """Compute x / rms(x) * weight, for rms with epsilon, over the last axis."""
        weight = self["weight"]
        if not self.training or x.dtype != mx.float32 or weight.dtype != mx.float32:
            return mx.fast.rms_norm(x, weight, self.eps)
        return _normed(x, weight, self.eps)[0]


def _normed(x: mx.array, weight: mx.array, eps: float) -> Sequence[mx.array]:
    @mx.custom_function
    def norm(x: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        inverse = mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + eps)
        return x * inverse * weight, inverse

    @norm.vjp
    def gradient(
        primals: tuple[mx.array, mx.array], cotangents: Sequence[mx.array], found: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """With r the inverse and h = cotangent * weight: d x = h r - x r^3 mean(h x)."""
        x, weight = primals
        inverse = found[1]
        scaled = cotangents[0] * weight
        pull = mx.mean(scaled * x, axis=-1, keepdims=True) * (inverse * inverse * inverse)
        of_weight = mx.sum((cotangents[0] * x * inverse).reshape(-1, x.shape[-1]), axis=0)
        return scaled * inverse - x * pull, of_weight

    return cast(Sequence[mx.array], norm(x, weight))


original = activations.swiglu


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """The product of `up` and gate / (1 + e^-gate); the name and the arguments are mlx-lm's."""
    if gate.dtype != mx.float32 or up.dtype != mx.float32:
        usual: mx.array = original(gate, up)
        return usual
    return cast(mx.array, _gated(gate, up))


@mx.custom_function
def _gated(gate: mx.array, up: mx.array) -> mx.array:
    return gate * _share(gate) * up


@_gated.vjp
def _gradient(primals: tuple[mx.array, mx.array], cotangent: mx.array, found: mx.array) -> tuple[mx.array, mx.array]:
    """With s the logistic function and y = gate s: d y / d gate = s + y (1 - s).

    s is computed anew: keeping it from the forward pass takes as much memory as the gate, and spares little time.
    """
    gate, up = primals
    share = _share(gate)
    silu = gate * share
    return cotangent * up * (share + silu * (1.0 - share)), cotangent * silu


def _share(gate: mx.array) -> mx.array:
    """The logistic function."""
    return mx.reciprocal(1.0 + exp(-gate))


class LowRankLinear(LoRALinear):
    """An adapted layer of mlx-lm's, y = W x + scale (x A) B: see `is_replaceable_lora`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Compute y, (..., outputs), of x, (..., inputs)."""
        x_N_I = mx.flatten(x, 0, -2)  # one product, not one per row
        y_N_O = self._trained(x_N_I) if self.training else self._computed(x_N_I, self.lora_a, self.lora_b)[0]
        return y_N_O.reshape(*x.shape[:-1], -1)

    def _computed(self, x_N_I: mx.array, a_I_R: mx.array, b_R_O: mx.array) -> tuple[mx.array, mx.array]:
        narrow_N_R = (x_N_I @ a_I_R) * self.scale
        return mx.addmm(self.linear(x_N_I), narrow_N_R, b_R_O), narrow_N_R

    def _trained(self, x_N_I: mx.array) -> mx.array:
        computed = mx.custom_function(self._computed)

        @computed.vjp
        def gradient(
            primals: tuple[mx.array, mx.array, mx.array], cotangents: Sequence[mx.array], found: Sequence[mx.array]
        ) -> tuple[mx.array, mx.array, mx.array]:
            (x_N_I, a_I_R, b_R_O), g_N_O = primals, cotangents[0]
            narrow_N_R = (g_N_O @ b_R_O.T) * self.scale
            of_x = mx.addmm(g_N_O @ self.linear.weight, narrow_N_R, a_I_R.T)
            return of_x, x_N_I.T @ narrow_N_R, found[1].T @ g_N_O

        return cast(Sequence[mx.array], computed(x_N_I, self.lora_a, self.lora_b))[0]


def is_replaceable_lora(layer: nn.Module) -> bool:
    """Whether `LowRankLinear` computes what this layer computes: in float32, with plain weights and no dropout."""
    if type(layer) is not LoRALinear or type(layer.linear) is not nn.Linear:
        return False
    return bool(layer.linear.weight.dtype == mx.float32) and layer.dropout._p_1 == 1.0


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def install_cpu_layers(model: nn.Module) -> None:
    """Let a model and its adapter compute as this package does: gates, norms, rotations, low-rank layers. Not on a GPU.

    Frozen weights are laid out by inputs, one layer after the other: their values and shapes stay. Modules stay the
    same objects. Gates are functions that mlx-lm's models import by name: they change in all of its modules loaded so
    far, for serving and training alike.
    """
    if not on_cpu():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{base.__package__}.") and vars(module).get("swiglu") is original:
            vars(module)["swiglu"] = swiglu
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = Norm
        elif is_replaceable_rope(module):
            module.__class__ = Rotation
        elif is_replaceable_lora(module):
            module.__class__ = LowRankLinear
        elif type(module) is nn.Linear and not module.trainable_parameters():
            module.weight = by_inputs(module.weight)
            mx.eval(module.weight)


def by_inputs(weight: mx.array) -> mx.array:
    """The same matrix, (outputs, inputs), with the weights of an input side by side.

    Else every product would bring them into this order first, which costs where rows are few.
    """
    return mx.contiguous(weight.T).T
