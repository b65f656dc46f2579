"""LoRA layers with few operations: the adapter is converted once per policy version, and layers share products.

mlx-lm's LoRA layer computes y = W x + scale (x A) B with A and B in float32: seven operations beside a 16-bit base. The
layers of this module compute the same from A and scale B in the type of their input:

    z = x A           with the A matrices of all layers that read the same input (queries, keys and values) side by side
    y = W x + z B'    with B' = scale B, and zero rows for the columns of z that belong to other layers

The frozen W of layers that read the same input are rows of one matrix (`clotho.models.joined_weights`), and their B'
are side by side: z, W x and z B' are one product each.

For the served weights A and B' are computed once, at a weight swap. For other weights, which can be traced by a
gradient, they are computed from the float32 weights in each call. Decode engine and learner therefore round alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from clotho.backend import backend
from clotho.models.joined_weights import JOINABLE, JoinedLinear, SharedResult, are_same, can_join, join
from clotho.models.module_calls import watched_calls

MAX_PADDED_RANK = 64
"""Maximum sum of ranks for which B' is padded with zero rows. With larger ranks, z is cut instead."""

Layer = Any
"""A `FoldedLoRALinear` or `FoldedLoRASwitchLinear`."""


class FoldedWeights(NamedTuple):
    """A and B' of a group in the compute type (b: of each layer, or of all side by side), and their float32 origins."""

    dtype: mx.Dtype
    lora_a: tuple[mx.array, ...]
    lora_b: tuple[mx.array, ...]
    a: mx.array
    b: tuple[mx.array, ...]


class LayerGroup:
    """Adapted layers that are called with the same input, in the order of their calls.

    dtype: type that the layers compute in. names: names of the layers in the model. base: the base layers as one layer;
    None if they cannot be joined. adds_at_once: whether one product adds the adapters of all layers.
    """

    def __init__(self, layers: Sequence[Layer], names: Sequence[str], dtype: mx.Dtype) -> None:
        self.layers = tuple(layers)
        self.names = tuple(names)
        self.dtype = dtype
        self._ranks = [layer.rank for layer in layers]
        self._starts = [sum(self._ranks[:i]) for i in range(len(layers))]
        self._pads = sum(self._ranks) <= MAX_PADDED_RANK
        bases = [layer.linear for layer in layers]
        self.base = JoinedLinear(bases) if can_join(bases) else None
        self.adds_at_once = self.base is not None and self._pads
        self._folded: FoldedWeights | None = None
        self._results = SharedResult(len(layers))

    def fold(self, arrays: Mapping[str, mx.array]) -> FoldedWeights:
        """Compute A and B' from float32 weights by parameter name; not evaluated."""
        lora_a = tuple(arrays[f"{name}.lora_a"] for name in self.names)
        lora_b = tuple(arrays[f"{name}.lora_b"] for name in self.names)
        b = [self._b(index, array, self.dtype) for index, array in enumerate(lora_b)]
        one_or_all = (mx.concatenate(b, axis=-1),) if self.adds_at_once else tuple(b)
        return FoldedWeights(self.dtype, lora_a, lora_b, self._a(lora_a, self.dtype), one_or_all)

    def serve(self, folded: FoldedWeights | None) -> None:
        """Use `folded` whenever the layers hold the weights that it was computed from; None: convert in every call."""
        self._folded = folded
        self._results.forget()

    def a(self, dtype: mx.Dtype) -> mx.array:
        """Return A of all layers side by side, for the current weights."""
        current = tuple(layer["lora_a"] for layer in self.layers)
        folded = self._folded
        if folded is not None and folded.dtype == dtype and are_same(current, folded.lora_a):
            return folded.a
        return self._a(current, dtype)

    def b(self, index: int, dtype: mx.Dtype) -> mx.array:
        """Return B' of one layer, for the current weights."""
        current, folded = self.layers[index]["lora_b"], self._folded
        if folded is not None and folded.dtype == dtype and current is folded.lora_b[index]:
            return folded.b[index]
        return self._b(index, current, dtype)

    def all_b(self, dtype: mx.Dtype) -> mx.array:
        """Return B' of all layers side by side, for the current weights, if the group `adds_at_once`."""
        current, folded = tuple(layer["lora_b"] for layer in self.layers), self._folded
        if folded is not None and folded.dtype == dtype and are_same(current, folded.lora_b):
            return folded.b[0]
        return mx.concatenate([self._b(index, array, dtype) for index, array in enumerate(current)], axis=-1)

    def shared(self, index: int, *given: Any) -> Any:
        """Return the result of `low_rank` for the input `given`, computed once for all layers of the group."""
        return self._results.read(index, given, lambda: self.layers[index].low_rank(*given))

    def own(self, index: int, z: mx.array) -> mx.array:
        """Return the columns of z that one layer multiplies by its B'."""
        if self._pads or len(self.layers) == 1:
            return z
        return z[..., self._starts[index] : self._starts[index] + self._ranks[index]]

    def _a(self, lora_a: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        matrices = [layer.input_major(array) for layer, array in zip(self.layers, lora_a, strict=True)]
        side_by_side: mx.array = matrices[0] if len(matrices) == 1 else mx.concatenate(matrices, axis=-1)
        return side_by_side.astype(dtype)

    def _b(self, index: int, lora_b: mx.array, dtype: mx.Dtype) -> mx.array:
        layer, rank = self.layers[index], self._ranks[index]
        b: mx.array = layer.input_major(layer.scale * lora_b).astype(dtype)
        if not self._pads or len(self.layers) == 1:
            return b
        rows = (self._starts[index], sum(self._ranks) - self._starts[index] - rank)
        return mx.pad(b, [(0, 0)] * (b.ndim - 2) + [rows, (0, 0)])


class LowRank(NamedTuple):
    """The input as a matrix, its product with A, and the outputs of joined layers; with their adapters if at once."""

    x_N_I: mx.array
    z_N_R: mx.array
    y_N_O: tuple[mx.array, ...]


class FoldedLoRALinear(LoRALinear):
    """mlx-lm's LoRA layer over a linear layer, quantized or not."""

    group: LayerGroup
    index: int

    @property
    def rank(self) -> int:
        """Number of columns of A."""
        return int(self.lora_a.shape[-1])

    @staticmethod
    def compute_type(dtype: mx.Dtype) -> mx.Dtype:
        """Return the type to compute in, for inputs of `dtype`."""
        return dtype

    @staticmethod
    def input_major(array: mx.array) -> mx.array:
        """Return A or B as (inputs, outputs)."""
        return array

    def __call__(self, x: mx.array) -> mx.array:
        """Compute y, (..., outputs), of x, (..., inputs)."""
        group, index = self.group, self.index
        if self.training and self.dropout._p_1 < 1.0:
            y = self.linear(x)
            z = self.dropout(x) @ self.lora_a.astype(x.dtype)
            return y + (z @ (self.scale * self.lora_b).astype(x.dtype)).astype(y.dtype)
        x_N_I, z_N_R, joined = group.shared(index, x)
        y_N_O = joined[index] if joined else self.linear(x_N_I)
        if not group.adds_at_once:
            y_N_O = mx.addmm(y_N_O, group.own(index, z_N_R), group.b(index, x.dtype))
        return y_N_O.reshape(*x.shape[:-1], -1)

    def low_rank(self, x: mx.array) -> LowRank:
        """Compute z of all layers of the group, and their outputs if they are joined."""
        group = self.group
        x_N_I = mx.flatten(x, 0, -2)
        z_N_R = x_N_I @ group.a(x.dtype)
        if group.base is None:
            return LowRank(x_N_I, z_N_R, ())
        y_N_O = group.base(x_N_I)
        if group.adds_at_once:
            y_N_O = mx.addmm(y_N_O, z_N_R, group.all_b(x.dtype))
        return LowRank(x_N_I, z_N_R, group.base.parts(y_N_O))


class FoldedLoRASwitchLinear(LoRASwitchLinear):
    """mlx-lm's LoRA layer over the experts of a mixture."""

    group: LayerGroup
    index: int

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return int(self.lora_a.shape[-2])

    @staticmethod
    def compute_type(dtype: mx.Dtype) -> mx.Dtype:
        """Return the type to compute in: MLX multiplies by experts in float32 only, if it computes on the CPU."""
        return dtype if mx.default_device() != mx.Device(mx.cpu) else mx.float32

    @staticmethod
    def input_major(array: mx.array) -> mx.array:
        """Return A or B as (experts, inputs, outputs)."""
        return array.swapaxes(-1, -2)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Compute the outputs of the experts `indices`. Arguments are mlx-lm's."""
        group, index = self.group, self.index
        y: mx.array = self.linear(x, indices, sorted_indices=sorted_indices)
        dtype = self.compute_type(x.dtype)
        if self.training and self.dropout._p_1 < 1.0:
            a, b = self.input_major(self.lora_a), self.input_major(self.scale * self.lora_b)
            z = _gathered(self.dropout(x).astype(dtype), a.astype(dtype), indices, sorted_indices)
            return y + _gathered(z, b.astype(dtype), indices, sorted_indices).astype(y.dtype)
        z = group.own(index, group.shared(index, x, indices, sorted_indices))
        return y + _gathered(z, group.b(index, dtype), indices, sorted_indices).astype(y.dtype)

    def low_rank(self, x: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
        """Compute z of all layers of the group."""
        dtype = self.compute_type(x.dtype)
        return _gathered(x.astype(dtype), self.group.a(dtype), indices, sorted_indices)


def _gathered(x: mx.array, weights_E_I_O: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
    return mx.gather_mm(x, weights_E_I_O, rhs_indices=indices, sorted_indices=sorted_indices)


FOLDED: dict[type, type] = {LoRALinear: FoldedLoRALinear, LoRASwitchLinear: FoldedLoRASwitchLinear}


class FoldedAdapter:
    """The LoRA layers of a model that this module computes; empty without LoRA, and on the host in float32.

    Modules stay the same objects; their class changes. Their float32 weights stay the parameters of the model. DoRA
    layers and fused projections of some architectures stay those of mlx-lm. Frozen layers without an adapter that read
    the same input are joined.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the layers that read the same input by one call of the model, which is not evaluated."""
        named = {name: module for name, module in model.named_modules() if type(module) in (*FOLDED, *JOINABLE)}
        self.groups: list[LayerGroup] = []
        names = {id(module): name for name, module in named.items()}
        kinds = {name: type(module) for name, module in named.items()}
        with watched_calls(named.values()) as calls:
            model(mx.zeros((1, 2), dtype=mx.int32))
        together: dict[tuple[str, type, int], list[nn.Module]] = {}
        dtypes: dict[str, mx.Dtype] = {}
        for call in calls:
            name = names[id(call.module)]
            if name not in dtypes:
                dtypes[name] = call.given.dtype
                parent = name.rpartition(".")[0]
                together.setdefault((parent, kinds[name], id(call.given)), []).append(call.module)
        for (_, kind, _), layers in together.items():
            dtype = dtypes[names[id(layers[0])]]
            if not backend().folds_adapters(dtype.size):
                continue
            if kind in FOLDED:
                self._add(layers, [names[id(layer)] for layer in layers], dtype)
            else:
                join(layers)

    def _add(self, layers: Sequence[Layer], names: Sequence[str], dtype: mx.Dtype) -> None:
        for layer in layers:
            layer.__class__ = FOLDED[type(layer)]
        group = LayerGroup(layers, names, layers[0].compute_type(dtype))
        for index, layer in enumerate(layers):
            layer.group, layer.index = group, index
        self.groups.append(group)

    def serve(self, arrays: Mapping[str, mx.array]) -> None:
        """Convert the weights of a policy version, by parameter name; evaluated, for all threads."""
        folded = [group.fold(arrays) for group in self.groups]
        mx.eval([(one.a, one.b) for one in folded])
        for group, one in zip(self.groups, folded, strict=True):
            group.serve(one)

    def forget(self) -> None:
        """Release the converted weights."""
        for group in self.groups:
            group.serve(None)
