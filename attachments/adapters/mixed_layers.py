"""Linear layers in a pass whose rows use different adapters.

For a linear layer, the A matrices of all adapters of the pass are side by side, and their B' = scale B on top of each
other. Every row keeps its own columns of z:

    z = x [A_1 | A_2 | ...]
    y = W x + (z where the column belongs to the row's adapter, else 0) [B'_1; B'_2; ...]

Ranks may differ, and a row without adapter adds zero. As in `clotho.models.folded_lora`, A and B' have the type of the
input, layers that read the same input share the product with A, and the policy's own adapter is one of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from clotho.inference.rows import RowAdapter
from clotho.models.folded_lora import FoldedLoRASwitchLinear


class Columns(NamedTuple):
    """A and B' of several adapters for the layers of a group.

    a: the A matrices side by side, layer by layer; None without columns. b: B' of every layer; None without columns.
    starts: first column of every layer, and the number of columns. owners: index of the adapter of every column.
    """

    a: mx.array | None
    b: tuple[mx.array | None, ...]
    starts: tuple[int, ...]
    owners: tuple[int, ...]


class Layer:
    """A linear layer of the model in a pass with several adapters.

    policy: the layer with the policy's adapter; None if the policy has none here. in_bank: whether the policy's adapter
    is plain LoRA, whose matrices are columns like those of other adapters.
    """

    def __init__(self, name: str, parent: Any, key: Any, base: Any, policy: Any) -> None:
        self.name, self.parent, self.key, self.base, self.policy = name, parent, key, base, policy
        self.is_switch = isinstance(base, (SwitchLinear, QuantizedSwitchLinear))
        self.in_bank = isinstance(policy, (LoRALinear, LoRASwitchLinear))

    def rank(self, adapter: RowAdapter | None) -> int:
        """Return the rank of an adapter in this layer; 0 if it does not change the layer."""
        if adapter is None:
            a = self.policy["lora_a"] if self.in_bank else None
        else:
            a = adapter.arrays.get(f"{self.name}.lora_a")
        return 0 if a is None else int(a.shape[-2 if self.is_switch else -1])

    def matrices(self, adapter: RowAdapter | None) -> tuple[mx.array, mx.array, float] | None:
        """Return A, B and the scale of an adapter as (..., inputs, outputs); None if it does not change the layer."""
        if adapter is None:
            if not self.in_bank:
                return None
            a, b, scale = self.policy["lora_a"], self.policy["lora_b"], float(self.policy.scale)
        elif self.name not in adapter.scales:
            return None
        else:
            a, b = adapter.arrays[f"{self.name}.lora_a"], adapter.arrays[f"{self.name}.lora_b"]
            scale = adapter.scales[self.name]
        return (a.swapaxes(-1, -2), b.swapaxes(-1, -2), scale) if self.is_switch else (a, b, scale)


class Group:
    """Layers that read the same input of type `dtype`, and what the current pass computes with."""

    def __init__(self, layers: Sequence[Layer], dtype: mx.Dtype) -> None:
        self.layers = tuple(layers)
        self.dtype = FoldedLoRASwitchLinear.compute_type(dtype) if layers[0].is_switch else dtype
        self._columns = Columns(None, (), (), ())
        self._mask_B_R: mx.array | None = None
        self._rows = 1
        self._given: Any = None
        self._low_rank: Any = None

    def build(self, adapters: Sequence[RowAdapter | None]) -> Columns:
        """Return the columns of the adapters; not evaluated."""
        a, b, starts, owners = [], [], [0], []
        for layer in self.layers:
            of_layer = []
            for index, adapter in enumerate(adapters):
                found = layer.matrices(adapter)
                if found is not None:
                    a.append(found[0].astype(self.dtype))
                    of_layer.append((found[2] * found[1]).astype(self.dtype))
                    owners += [index] * found[0].shape[-1]
            b.append(_joined(of_layer, axis=-2))
            starts.append(len(owners))
        return Columns(_joined(a, axis=-1), tuple(b), tuple(starts), tuple(owners))

    def use(self, columns: Columns, mask_B_R: mx.array | None, rows: int) -> None:
        """Compute the next pass with these columns. mask_B_R: columns of every row; None if all rows use all."""
        self._columns, self._mask_B_R, self._rows = columns, mask_B_R, rows
        self._given = self._low_rank = None

    def product(self, given: Any, compute: Callable[[mx.array], mx.array]) -> mx.array | None:
        """Return z of all layers for the input `given`, computed once; None if no adapter has columns here."""
        if self._columns.a is None:
            return None
        if given is not self._given:
            self._given, self._low_rank = given, compute(self._columns.a)
        result: mx.array = self._low_rank
        return result

    def masked(self, z_N_R: mx.array, row_of_N: mx.array | None = None) -> mx.array:
        """Set the columns of other rows to zero. row_of_N: row of every entry; None if entries follow the rows."""
        mask = self._mask_B_R
        if mask is None:
            return z_N_R
        if row_of_N is not None:
            return mx.where(mask[row_of_N], z_N_R, mx.zeros((), z_N_R.dtype))
        each = z_N_R.shape[0] // self._rows
        if each == 1:
            return mx.where(mask, z_N_R, mx.zeros((), z_N_R.dtype))
        z_B_E_R = z_N_R.reshape(self._rows, each, -1)
        return mx.where(mask[:, None], z_B_E_R, mx.zeros((), z_N_R.dtype)).reshape(z_N_R.shape)

    def of_layer(self, index: int, z: mx.array) -> mx.array:
        """Return the columns of one layer."""
        starts = self._columns.starts
        return z if len(self.layers) == 1 else z[..., starts[index] : starts[index + 1]]

    def b(self, index: int) -> mx.array | None:
        """Return B' of one layer."""
        return self._columns.b[index]

    def end(self) -> None:
        """Release the arrays of the pass."""
        self.use(Columns(None, (), (), ()), None, 1)


def _joined(matrices: list[mx.array], *, axis: int) -> mx.array | None:
    if len(matrices) < 2:
        return matrices[0] if matrices else None
    joined: mx.array = mx.concatenate(matrices, axis=axis)
    return joined


class MixedLinear:
    """Replaces a linear layer while the graph of a pass with several adapters is built."""

    def __init__(self, layer: Layer, group: Group, index: int) -> None:
        self.layer, self.group, self.index = layer, group, index
        self.policy_rows_B: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer.base, name)

    def __call__(self, x: mx.array) -> mx.array:
        """Compute y, (..., outputs), of x, (..., inputs)."""
        group, index = self.group, self.index
        y: mx.array = self.layer.base(x)
        b = group.b(index)
        if b is not None:
            z_N_R = group.product(x, lambda a: group.masked(mx.flatten(x, 0, -2).astype(group.dtype) @ a))
            assert z_N_R is not None
            y = mx.addmm(mx.flatten(y, 0, -2), group.of_layer(index, z_N_R), b).reshape(y.shape)
        if self.policy_rows_B is not None:
            each = x.size // x.shape[-1] // self.policy_rows_B.shape[0]
            rows = mx.repeat(self.policy_rows_B, each).reshape(*x.shape[:-1], 1)
            y = mx.where(rows, self.layer.policy(x), y)
        return y


class Routed:
    """Replaces a mixture of experts while the graph of a pass is built, to know which row every entry belongs to."""

    def __init__(self, experts: Any) -> None:
        self.experts = experts
        self.rows = 1
        self._indices: mx.array | None = None
        self._row_of_N: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.experts, name)

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Compute the experts. Arguments are mlx-lm's."""
        self._indices, self._row_of_N = indices, None
        y: mx.array = self.experts(x, indices)
        self._indices = self._row_of_N = None
        return y

    def sorted_rows(self) -> mx.array:
        """Return the row of every entry after mlx-lm has sorted the entries by expert."""
        assert self._indices is not None
        if self._row_of_N is None:
            entries = self._indices.flatten()
            self._row_of_N = mx.argsort(entries) // (entries.size // self.rows)
        return self._row_of_N


class MixedSwitchLinear:
    """Replaces a linear layer of experts while the graph of a pass with several adapters is built."""

    def __init__(self, layer: Layer, group: Group, index: int, routed: Routed) -> None:
        self.layer, self.group, self.index, self.routed = layer, group, index, routed
        self.policy_rows_B: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer.base, name)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Compute the outputs of the experts `indices`. Arguments are mlx-lm's."""
        group, index = self.group, self.index
        y: mx.array = self.layer.base(x, indices, sorted_indices=sorted_indices)
        b = group.b(index)
        if b is None:
            return y

        def low_rank(a: mx.array) -> mx.array:
            z = mx.gather_mm(x.astype(group.dtype), a, rhs_indices=indices, sorted_indices=sorted_indices)
            row_of_N = self.routed.sorted_rows() if sorted_indices else None
            return group.masked(mx.flatten(z, 0, -2), row_of_N).reshape(z.shape)

        z = group.product(x, low_rank)
        assert z is not None
        z = group.of_layer(index, z)
        return y + mx.gather_mm(z, b, rhs_indices=indices, sorted_indices=sorted_indices).astype(y.dtype)


Mixed = MixedLinear | MixedSwitchLinear
