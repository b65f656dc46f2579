"""The root mean square norm while it is trained through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn


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
