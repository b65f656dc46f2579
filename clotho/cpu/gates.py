"""The gate of a feed-forward layer, silu(gate) * up, and its gradient."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
from mlx_lm.models import activations

from clotho.cpu.exponential import exp

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
