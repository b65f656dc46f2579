"""The exponential over the vocabulary, which is most of what token scores cost on the CPU."""

from __future__ import annotations

import math

import mlx.core as mx


def exp(x: mx.array) -> mx.array:
    """e to the power of float32 numbers: relative error below 4e-6 where the result is normal, below 1e-6 above e^-20.

    On the CPU backend `mx.power` takes a third of the time of `mx.exp` (3 against 9 ns per element) and is as accurate;
    on a GPU `mx.exp` is an instruction. Minus infinity gives 0, NaN stays NaN.
    """
    return mx.power(math.e, x) if mx.default_device() == mx.Device(mx.cpu) else mx.exp(x)
