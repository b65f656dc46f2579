"""Layers of a decode step in NumPy: linear layers with adapters, norms, gates and rotations.

The weights are the MLX arrays of the modules, looked up at every use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from attachments.cpu.adapter_segments import Arrangement, GroupLowRank, LowRank, grouped, low_rank_products
from attachments.cpu.blas import Floats, Matrix, Product, matrix, multiply, prepared
from clotho.inference.rows import RowAdapter


def as_numpy(array: mx.array) -> Floats:
    """Return a NumPy view of an evaluated float32 array."""
    return np.array(array, copy=False)


class WeightMatrix:
    """A matrix parameter of a module, (inputs, outputs). Follows the module through weight swaps."""

    def __init__(self, module: nn.Module, key: str, *, transposed: bool) -> None:
        """transposed: the module stores it as (outputs, inputs)."""
        self._module: dict[str, Any] = module
        self._key, self._transposed = key, transposed
        self._array: mx.array | None = None
        self._matrix: Matrix | None = None

    def __call__(self) -> Matrix:
        """Return the current matrix."""
        array = self._module[self._key]
        if array is not self._array or self._matrix is None:
            values = as_numpy(array)
            self._array, self._matrix = array, matrix(values.T if self._transposed else values)
        return self._matrix


class ParameterVector:
    """Concatenated one-dimensional parameters of modules, each repeated. Follows the modules through weight swaps."""

    def __init__(self, *parts: tuple[nn.Module, str, int]) -> None:
        """parts: module, key, and number of repetitions of its parameter."""
        self._parts: tuple[tuple[dict[str, Any], str, int], ...] = parts
        self._arrays: list[mx.array] = []
        self._values: Floats = np.zeros(0, np.float32)

    def __call__(self) -> Floats:
        """Return the current parameters, (repeats, size)."""
        arrays = [module[key] for module, key, _ in self._parts]
        if not (self._arrays and all(map(is_, arrays, self._arrays))):
            times = [times for _, _, times in self._parts]
            rows = [np.tile(as_numpy(array), (n, 1)) for array, n in zip(arrays, times, strict=True)]
            self._arrays, self._values = arrays, np.concatenate(rows)
        return self._values


class Projection:
    """A linear layer, y = x W + b, plus scale (x A) B if it has a LoRA adapter.

    parameters: where its matrices are: module and key.
    """

    def __init__(self, layer: nn.Module, name: str) -> None:
        """layer: an `nn.Linear`, or a `LoRALinear` over one. name: its name in the model."""
        self.name = name
        base: Any = layer
        self._scale, self.rank = 0.0, 0
        if isinstance(layer, LoRALinear):
            base = layer.linear
            self._scale, self.rank = float(layer.scale), layer.lora_a.shape[1]
            self._a = WeightMatrix(layer, "lora_a", transposed=False)
            self._b = WeightMatrix(layer, "lora_b", transposed=False)
        self._weights = WeightMatrix(base, "weight", transposed=True)
        self.parameters: list[tuple[dict[str, Any], str]] = [(base, "weight")]
        self.parameters += [(layer, "lora_a"), (layer, "lora_b")] if self.rank else []
        self._bias = ParameterVector((base, "bias", 1)) if "bias" in base else None
        self.outputs: int = base.weight.shape[0]

    def start(self, out: Matrix, *, add: bool) -> bool:
        """Write the bias to `out`, if there is one; return whether the product x W is added to `out`.

        add: the values in `out` stay.
        """
        if self._bias is None:
            return add
        np.add(out.array if add else 0.0, self._bias(), out=out.array)
        return True

    def weights(self) -> Matrix:
        """Return W."""
        return self._weights()

    def own(self) -> LowRank | None:
        """Return the matrices of the policy's adapter."""
        return LowRank(self._a(), self._b(), self._scale) if self.rank else None


class Plan(NamedTuple):
    """Prepared products of a group of layers. places: of the buffers. arrays: the parameters."""

    places: tuple[Any, ...]
    arrays: list[mx.array]
    base: Callable[[], None]
    low_rank: Callable[[], None]


class ProjectionGroup:
    """Linear layers that read the same input. name, outputs: of the first layer."""

    def __init__(self, *projections: Projection) -> None:
        self.projections, self.name = projections, projections[0].name
        self.outputs = projections[0].outputs
        self._parameters = [one for projection in projections for one in projection.parameters]

    def __call__(self, x: Matrix, outs: Sequence[Matrix], low_rank: LowRankBuffers, *, add: bool = False) -> None:
        """Write the outputs of the layers to `outs`, or add them to the values there."""
        adds = tuple(one.start(out, add=add) for one, out in zip(self.projections, outs, strict=True))
        arrays = [module[key] for module, key in self._parameters]
        places = (x.address, adds, low_rank.arrangement is None, *[out.address for out in outs])
        plan = low_rank.plans.get(self.name)
        if plan is None or plan.places != places or not all(map(is_, arrays, plan.arrays)):
            plan = low_rank.plans[self.name] = Plan(places, arrays, *self._prepared(x, outs, adds, low_rank))
        plan.base()
        plan.low_rank()
        if low_rank.arrangement is not None:
            low_rank.arrangement.add(self, x, outs, low_rank)

    def _prepared(
        self, x: Matrix, outs: Sequence[Matrix], adds: Sequence[bool], low_rank: LowRankBuffers
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return what computes the products with the inputs, then those with the results of x A."""
        parts = zip(self.projections, outs, adds, strict=True)
        base = [Product(x, projection.weights(), out, add=added) for projection, out, added in parts]
        policy = grouped(self.own(), joins=False) if low_rank.arrangement is None else None
        rows = slice(0, len(x.array))
        into_z, into_out = low_rank_products(policy, rows, x, outs, low_rank) if policy is not None else ([], [])
        return prepared(base + into_z), prepared(into_out)

    def own(self) -> list[LowRank | None]:
        """Return the matrices of the policy's adapter, by layer."""
        return [projection.own() for projection in self.projections]

    def of(self, adapter: RowAdapter) -> GroupLowRank | None:
        """Return the matrices of an adapter; None if it changes none of the layers."""
        low_ranks: list[LowRank | None] = []
        for name in (projection.name for projection in self.projections):
            scale = adapter.scales.get(name)
            if scale is None:
                low_ranks.append(None)
                continue
            a, b = (mlx_matrix(adapter.arrays[f"{name}.{part}"]) for part in ("lora_a", "lora_b"))
            low_ranks.append(LowRank(a, b, scale))
        return grouped(low_ranks, joins=True)


class RMSNorm:
    """x / rms(x) * weight over the last axis."""

    def __init__(self, module: nn.Module) -> None:
        """module: an `nn.RMSNorm`."""
        self._weight, self.eps = ParameterVector((module, "weight", 1)), float(module.eps)

    def __call__(self, x_B_W: Floats, out_B_W: Floats) -> None:
        """Write the normalised x to `out`."""
        np.multiply(x_B_W, inverse_rms(x_B_W, self.eps), out=out_B_W)
        out_B_W *= self._weight()


def inverse_rms(x: Floats, eps: float) -> Floats:
    """Return 1 / sqrt(mean of squares + eps) over the last axis, which keeps size 1."""
    squares: Floats = np.vecdot(x, x)[..., None]
    squares *= np.float32(1.0 / x.shape[-1])
    squares += np.float32(eps)
    np.sqrt(squares, out=squares)
    np.divide(np.float32(1.0), squares, out=squares)
    return squares


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + e^-x)."""
    result: Floats = np.exp(-x)
    result += 1.0
    np.divide(np.float32(1.0), result, out=result)
    return result


def swiglu_in_place(gate: Floats, up: Floats, spare: Floats) -> None:
    """Replace `gate` by silu(gate) * up. spare: a buffer of the same shape."""
    np.negative(gate, out=spare)
    np.exp(spare, out=spare)
    spare += 1.0
    np.divide(gate, spare, out=gate)
    gate *= up


def projections(module: Any, name: str, *keys: str) -> ProjectionGroup:
    """Return the layers of a module that read the same input. name: of the module."""
    return ProjectionGroup(*(Projection(module[key], f"{name}.{key}") for key in keys))


class LowRankBuffers(dict[int, Matrix]):
    """Buffers for x A by rank, and the arrangement of the rows if they have several adapters.

    plans: the prepared products of each group of layers.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.arrangement: Arrangement | None = None
        self.plans: dict[str, Plan] = {}
        self._rows = rows

    def __missing__(self, rank: int) -> Matrix:
        buffer = self[rank] = empty(self._rows, rank)
        return buffer


class TiedHead:
    """A head that uses the embedding matrix."""

    name = ""

    def __init__(self, embeddings: WeightMatrix, module: Any) -> None:
        self._embeddings, self.outputs = embeddings, int(module.weight.shape[0])

    def __call__(self, x: Matrix, outs: Sequence[Matrix], low_rank: LowRankBuffers) -> None:
        """Write the logits to the only matrix of `outs`."""
        multiply(x, self._embeddings(), outs[0])

    def own(self) -> list[LowRank | None]:
        """Return no matrices."""
        return []


def cosines_and_sines(position_B: NDArray[np.int32], frequency_H: Floats) -> tuple[Floats, Floats]:
    """Return the cosines for both halves of a head, (B, 1, 2 H), and the sines for one half, (B, 1, H)."""
    angle_B_1_H = (position_B.astype(np.float32)[:, None] * frequency_H)[:, None]
    cosine_B_1_H = np.cos(angle_B_1_H)
    return np.concatenate([cosine_B_1_H, cosine_B_1_H], axis=-1), np.sin(angle_B_1_H)


def rotate(x_B_N_D: Floats, cosine_B_1_R: Floats, sine_B_1_H: Floats) -> None:
    """Apply rotary position embeddings in place to the first R = 2 H numbers of heads, by halves.

    Source: RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    half, rotated = sine_B_1_H.shape[-1], cosine_B_1_R.shape[-1]
    if rotated < x_B_N_D.shape[-1]:
        x_B_N_D = x_B_N_D[..., :rotated]
    first, second = x_B_N_D[..., :half], x_B_N_D[..., half:]
    rotated_first, rotated_second = second * sine_B_1_H, first * sine_B_1_H
    x_B_N_D *= cosine_B_1_R
    first -= rotated_first
    second += rotated_second


def allocated(shape: tuple[int, ...]) -> Floats:
    """Return zeros that MLX allocates, so that they count as MLX memory; a copy, which waits for no other operation."""
    return as_numpy(mx.array(np.zeros(shape, np.float32)))


def mlx_matrix(array: mx.array) -> Matrix:
    """Return the BLAS view of an evaluated MLX array."""
    return matrix(as_numpy(array))


def empty(rows: int, columns: int) -> Matrix:
    """Return a new matrix without defined values."""
    return matrix(np.empty((rows, columns), np.float32))
