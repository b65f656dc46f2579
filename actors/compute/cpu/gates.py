"""The gate of a feed-forward layer, silu(gate) * up, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models import activations

from actors.compute.exponential import exp

original = activations.swiglu


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """The product of `up` and gate / (1 + e^-gate); the name and the arguments are mlx-lm's."""
    if gate.dtype != mx.float32 or up.dtype != mx.float32:
        usual: mx.array = original(gate, up)
        return usual
    return cast(Sequence[mx.array], _gated(gate, up))[0]


@mx.custom_function
def _gated(gate: mx.array, up: mx.array) -> tuple[mx.array, mx.array]:
    """The product, and the logistic function of the gate."""
    share = mx.reciprocal(1.0 + exp(-gate))
    return gate * share * up, share


@_gated.vjp
def _gradient(
    primals: tuple[mx.array, mx.array], cotangents: Sequence[mx.array], found: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """With s the logistic function and y = gate s: d y / d gate = s + y (1 - s)."""
    gate, up = primals
    cotangent, share = cotangents[0], found[1]
    silu = gate * share
    return cotangent * up * (share + silu * (1.0 - share)), cotangent * silu
