"""The layers of a transformer over buffers on the host. Their parameters are MLX's: they are looked up at every use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear

from clotho.cpu.blas import Floats, Matrix, matrix, multiply


def seen(array: mx.array) -> Floats:
    """The values of an evaluated float32 array, where they lie."""
    return np.array(array, copy=False)


class Weights:
    """A matrix among a module's parameters, (inputs, outputs). It follows the module when weights are swapped."""

    def __init__(self, module: nn.Module, key: str, *, transposed: bool) -> None:
        """transposed: the module holds it as (outputs, inputs)."""
        self._module: dict[str, Any] = module
        self._key, self._transposed = key, transposed
        self._array: mx.array | None = None
        self._matrix: Matrix | None = None

    def __call__(self) -> Matrix:
        """The matrix as it is now."""
        array = self._module[self._key]
        if array is not self._array or self._matrix is None:
            values = seen(array)
            self._array, self._matrix = array, matrix(values.T if self._transposed else values)
        return self._matrix


class Vector:
    """One-dimensional parameters of modules, one after the other, each repeated; they follow their modules too."""

    def __init__(self, *parts: tuple[nn.Module, str, int]) -> None:
        """parts: module, key, and how often its parameter comes."""
        self._parts: tuple[tuple[dict[str, Any], str, int], ...] = parts
        self._arrays: list[mx.array] = []
        self._values: Floats = np.zeros(0, np.float32)

    def __call__(self) -> Floats:
        """The parameters as they are now, (repeats, size)."""
        arrays = [module[key] for module, key, _ in self._parts]
        if len(arrays) != len(self._arrays) or any(a is not b for a, b in zip(arrays, self._arrays, strict=True)):
            times = [times for _, _, times in self._parts]
            rows = [np.tile(seen(array), (n, 1)) for array, n in zip(arrays, times, strict=True)]
            self._arrays, self._values = arrays, np.concatenate(rows)
        return self._values


class Projection:
    """A linear layer, y = x W + b, with an adapter's low-rank term if it has one, scale (x A) B."""

    def __init__(self, layer: nn.Module) -> None:
        """layer: an `nn.Linear`, or a `LoRALinear` over one."""
        base: Any = layer
        self._scale, self.rank = 0.0, 0
        if isinstance(layer, LoRALinear):
            base = layer.linear
            self._scale, self.rank = float(layer.scale), layer.lora_a.shape[1]
            self._a = Weights(layer, "lora_a", transposed=False)
            self._b = Weights(layer, "lora_b", transposed=False)
        self._weights = Weights(base, "weight", transposed=True)
        self._bias = Vector((base, "bias", 1)) if "bias" in base else None
        self.outputs: int = base.weight.shape[0]

    def __call__(self, x: Matrix, out: Matrix, narrow: Mapping[int, Matrix], *, add: bool = False) -> None:
        """Write y of x into `out`, or add it to what is there. narrow: room for x A, by rank."""
        if self._bias is not None:
            np.add(out.array if add else 0.0, self._bias(), out=out.array)
            add = True
        multiply(x, self._weights(), out, add=add)
        if self.rank:
            multiply(x, self._a(), narrow[self.rank])
            multiply(narrow[self.rank], self._b(), out, scale=self._scale, add=True)


class Norm:
    """x / rms(x) * weight over the last axis."""

    def __init__(self, module: nn.Module) -> None:
        """module: an `nn.RMSNorm`."""
        self._weight, self.eps = Vector((module, "weight", 1)), float(module.eps)

    def __call__(self, x_B_W: Floats, out_B_W: Floats) -> None:
        """Write the norm of x into `out`."""
        np.multiply(x_B_W, inverse_rms(x_B_W, self.eps), out=out_B_W)
        out_B_W *= self._weight()


def inverse_rms(x: Floats, eps: float) -> Floats:
    """1 / sqrt(mean of squares + eps) over the last axis, which stays with size 1."""
    squares: Floats = np.vecdot(x, x)[..., None]
    squares *= np.float32(1.0 / x.shape[-1])
    squares += np.float32(eps)
    np.sqrt(squares, out=squares)
    np.divide(np.float32(1.0), squares, out=squares)
    return squares


def gate(gate: Floats, up: Floats, spare: Floats) -> None:
    """Replace `gate` by silu(gate) * up; `spare` is room of the same shape."""
    np.negative(gate, out=spare)
    np.exp(spare, out=spare)
    spare += 1.0
    np.divide(gate, spare, out=gate)
    gate *= up
