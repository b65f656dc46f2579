"""A low-rank layer over a linear one: the scale where numbers are few, and sums inside matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear


class LowRankLinear(LoRALinear):
    """An adapted layer of mlx-lm's, y = W x + scale (x A) B: see `takes`."""

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


def takes(layer: nn.Module) -> bool:
    """Whether `LowRankLinear` computes what this layer computes: in float32, with plain weights and no dropout."""
    if type(layer) is not LoRALinear or type(layer.linear) is not nn.Linear:
        return False
    return bool(layer.linear.weight.dtype == mx.float32) and layer.dropout._p_1 == 1.0
