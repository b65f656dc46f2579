"""One forward pass whose rows use different adapters, the policy, or the base model.

For a linear layer, the A matrices of all adapters of the pass are side by side, and their B' = scale B on top of each
other. Every row keeps its own columns of z:

    z = x [A_1 | A_2 | ...]
    y = W x + (z where the column belongs to the row's adapter, else 0) [B'_1; B'_2; ...]

Ranks may differ, and a row without adapter adds zero. As in `clotho.models.folded_lora`, A and B' have the type of the
input, layers that read the same input share the product with A, and the policy's own adapter is one of the adapters.
The layers replace those of the model only while the graph of such a pass is built: passes in which all rows use the
policy, and training, compute with the unchanged model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from numpy.typing import NDArray

from clotho.models.adapter_files import AdapterContents
from clotho.models.adapter_store import AdapterStore, LoadedAdapter
from clotho.models.folded_lora import FoldedLoRASwitchLinear
from clotho.models.lora import watched_calls
from clotho.models.parameters import locate
from protocols.errors import AdapterRequestError

RowAdapters = Sequence[LoadedAdapter | None]
"""The adapter of every row; None for the policy."""

KEPT_BANKS = 2
"""Number of banks of several adapters that are kept."""

LARGEST_EXCESS = 4
"""A bank is used for a subset of its adapters if it has at most this many times the columns of the subset."""


POLICY_KEY, BASE_KEY = 0, -1
"""Numbers that identify the policy and the base model; the number of an adapter is its version."""


class Columns(NamedTuple):
    """A and B' of several adapters for the layers of a group.

    a: the A matrices side by side, layer by layer; None without columns. b: B' of every layer; None without columns.
    starts: first column of every layer, and the number of columns. owners: index of the adapter of every column.
    """

    a: mx.array | None
    b: tuple[mx.array | None, ...]
    starts: tuple[int, ...]
    owners: tuple[int, ...]


class Bank(NamedTuple):
    """The columns of several adapters for every group. policy: matrices of the policy that they were built from."""

    adapters: tuple[LoadedAdapter | None, ...]
    groups: tuple[Columns, ...]
    policy: tuple[mx.array, ...]

    @property
    def columns(self) -> int:
        """Number of columns of all groups."""
        return sum(len(group.owners) for group in self.groups)


class Route(NamedTuple):
    """What a pass computes with. keys: of the rows. policy: as in `Bank`. masks: by the owners of the columns.

    policy_rows_B: which rows use the policy; None if no row does.
    """

    keys: tuple[int, ...]
    policy: tuple[mx.array, ...]
    bank: Bank
    masks: dict[tuple[int, ...], mx.array | None]
    policy_rows_B: mx.array | None


class Layer:
    """A linear layer of the model in a pass with several adapters.

    policy: the layer with the policy's adapter; None if the policy has none here. in_bank: whether the policy's adapter
    is plain LoRA, whose matrices are columns like those of other adapters.
    """

    def __init__(self, name: str, parent: Any, key: Any, base: Any, policy: Any) -> None:
        self.name, self.parent, self.key, self.base, self.policy = name, parent, key, base, policy
        self.is_switch = isinstance(base, (SwitchLinear, QuantizedSwitchLinear))
        self.in_bank = isinstance(policy, (LoRALinear, LoRASwitchLinear))

    def rank(self, adapter: LoadedAdapter | None) -> int:
        """Return the rank of an adapter in this layer; 0 if it does not change the layer."""
        if adapter is None:
            a = self.policy["lora_a"] if self.in_bank else None
        else:
            a = adapter.arrays.get(f"{self.name}.lora_a")
        return 0 if a is None else int(a.shape[-2 if self.is_switch else -1])

    def matrices(self, adapter: LoadedAdapter | None) -> tuple[mx.array, mx.array, float] | None:
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

    def build(self, adapters: Sequence[LoadedAdapter | None]) -> Columns:
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


class AdapterRows:
    """Computes rows with different adapters in one pass of the model. Belongs to the compute thread."""

    def __init__(self, store: AdapterStore) -> None:
        """Find the layers that read the same input by one call of the model, which is not evaluated."""
        adapted = {module.name: module for module in store.adapted}
        layers, modules = {}, []
        for name in store.targets:
            parent, key = locate(store.model, name)
            base = adapted[name].base if name in adapted else parent[key]
            layers[name] = Layer(name, parent, key, base, adapted[name].adapted if name in adapted else None)
            modules.append(parent[key])
        by_module = {id(module): layer for module, layer in zip(modules, layers.values(), strict=True)}
        with watched_calls(modules) as calls:
            store.model(mx.zeros((1, 2), dtype=mx.int32))
        self._experts = _experts(store.model)
        together: dict[tuple[int, bool], list[Layer]] = {}
        inputs: dict[tuple[int, bool], Any] = {}
        for call in calls:
            layer = by_module.get(id(call.module))
            if layer is not None and self._computes(layer):
                del by_module[id(call.module)]
                key = id(call.given), layer.is_switch
                together.setdefault(key, []).append(layer)
                inputs[key] = call.given
        self._unreached = {layer.name for layer in by_module.values()}
        self._groups = tuple(Group(members, inputs[key].dtype) for key, members in together.items())
        self._mixed: tuple[tuple[Mixed, ...], ...] = tuple(
            tuple(self._make(layer, group, index) for index, layer in enumerate(group.layers)) for group in self._groups
        )
        self._policy_layers = [layer for group in self._groups for layer in group.layers if layer.in_bank]
        self._of_one: dict[int, Bank] = {}
        self._of_several: OrderedDict[tuple[int, ...], Bank] = OrderedDict()
        self._route: Route | None = None

    def _computes(self, layer: Layer) -> bool:
        """Whether this module can compute the layer: experts must be those of mlx-lm's usual mixtures.

        Raises AdapterRequestError if it cannot and the policy has an adapter there.
        """
        if not layer.is_switch or layer.name.rpartition(".")[0] in self._experts:
            return True
        if layer.policy is None:
            return False
        raise AdapterRequestError(f"{layer.name}: only the policy can be served with this layer", reason="invalid")

    def _make(self, layer: Layer, group: Group, index: int) -> Mixed:
        if layer.is_switch:
            return MixedSwitchLinear(layer, group, index, self._experts[layer.name.rpartition(".")[0]].routed)
        return MixedLinear(layer, group, index)

    def require(self, contents: AdapterContents) -> None:
        """Raise AdapterRequestError if the adapter changes a layer that a pass does not reach, or cannot compute."""
        unreached = sorted(self._unreached & contents.scales.keys())
        if unreached:
            raise AdapterRequestError(f"{contents.path}: {unreached[0]} cannot have an adapter", reason="invalid")

    def keep(self, versions: set[int]) -> None:
        """Release converted matrices of all adapters but these; running rows convert theirs again."""
        self._of_one = {version: bank for version, bank in self._of_one.items() if version in versions}
        self._route = None
        for key in [key for key in self._of_several if not set(key) <= {*versions, POLICY_KEY}]:
            del self._of_several[key]

    @contextmanager
    def computing(self, adapter_B: RowAdapters) -> Iterator[None]:
        """Build the graph of a pass inside the context: row b uses adapter_B[b]."""
        self._use(self._route_of(adapter_B))
        replaced: list[tuple[Any, Any, Any]] = []
        try:
            for mixed in chain.from_iterable(self._mixed):
                layer = mixed.layer
                if layer.policy is not None or mixed.group.b(mixed.index) is not None:
                    replaced.append((layer.parent, layer.key, layer.parent[layer.key]))
                    layer.parent[layer.key] = mixed
            for one in self._experts.values():
                replaced.append((one.parent, one.key, one.parent[one.key]))
                one.parent[one.key] = one.routed
            yield
        finally:
            for parent, key, module in reversed(replaced):
                parent[key] = module
            for group in self._groups:
                group.end()

    def _use(self, route: Route) -> None:
        """Tell every group its columns and the columns of every row."""
        rows = len(route.keys)
        for group, mixed, columns in zip(self._groups, self._mixed, route.bank.groups, strict=True):
            group.use(columns, route.masks[columns.owners], rows)
            for one in mixed:
                one.policy_rows_B = None if one.layer.policy is None or one.layer.in_bank else route.policy_rows_B
        for experts in self._experts.values():
            experts.routed.rows = rows

    def _route_of(self, adapter_B: RowAdapters) -> Route:
        """Return the bank and the masks of a pass; those of the last pass if its rows were the same."""
        keys = tuple(map(_key, adapter_B))
        policy = self._policy_matrices() if POLICY_KEY in keys else ()
        if self._route is None or self._route.keys != keys or not _are_same(self._route.policy, policy):
            bank = self._bank(dict(zip(keys, adapter_B, strict=True)), policy)
            index_of = {_key(adapter): index for index, adapter in enumerate(bank.adapters)}
            index_B = np.array([index_of.get(key, -1) for key in keys])
            masks = {owners: _mask(index_B, owners) for owners in {columns.owners for columns in bank.groups}}
            policy_rows_B = mx.array(np.array(keys) == POLICY_KEY) if POLICY_KEY in keys else None
            self._route = Route(keys, policy, bank, masks, policy_rows_B)
        return self._route

    def _bank(self, rows: Mapping[int, LoadedAdapter | None], policy: tuple[mx.array, ...]) -> Bank:
        """Return a bank that contains the adapters of all rows. policy: its matrices, if the policy has rows."""
        needed = {key: one for key, one in rows.items() if (policy if one is None else one.scales)}
        if len(needed) == 1 and POLICY_KEY not in needed:
            ((version, adapter),) = needed.items()
            if version not in self._of_one:
                self._of_one[version] = self._build([adapter], ())
            return self._of_one[version]
        if POLICY_KEY in needed:
            self._of_several = OrderedDict(
                (key, bank)
                for key, bank in self._of_several.items()
                if POLICY_KEY not in key or _are_same(bank.policy, policy)
            )
        wanted = self._columns(needed)
        for key, bank in self._of_several.items():
            if needed.keys() <= set(key) and bank.columns <= LARGEST_EXCESS * wanted:
                self._of_several.move_to_end(key)
                return bank
        for bank in self._of_several.values():
            merged = {_key(adapter): adapter for adapter in bank.adapters if adapter is not None} | needed
            if self._columns(merged) <= LARGEST_EXCESS * wanted:
                needed = merged
        key = tuple(sorted(needed))
        bank = self._of_several[key] = self._build([needed[one] for one in key], policy)
        while len(self._of_several) > KEPT_BANKS:
            self._of_several.popitem(last=False)
        return bank

    def _columns(self, adapters: Mapping[int, LoadedAdapter | None]) -> int:
        """Return how many columns of A the adapters have in all layers."""
        layers = [layer for group in self._groups for layer in group.layers]
        return sum(layer.rank(adapter) for layer in layers for adapter in adapters.values())

    def _build(self, adapters: Sequence[LoadedAdapter | None], policy: tuple[mx.array, ...]) -> Bank:
        groups = tuple(group.build(adapters) for group in self._groups)
        mx.eval([array for columns in groups for array in (columns.a, *columns.b) if array is not None])
        return Bank(tuple(adapters), groups, policy)

    def _policy_matrices(self) -> tuple[mx.array, ...]:
        """Return the matrices of the policy that banks contain; a weight swap replaces them."""
        return tuple(layer.policy[matrix] for layer in self._policy_layers for matrix in ("lora_a", "lora_b"))


class _Experts(NamedTuple):
    parent: Any
    key: Any
    routed: Routed


def _experts(model: nn.Module) -> dict[str, _Experts]:
    """Return the mixtures of experts by name."""
    return {
        name: _Experts(*locate(model, name), Routed(module))
        for name, module in model.named_modules()
        if isinstance(module, (SwitchGLU, SwitchMLP))
    }


def _key(adapter: LoadedAdapter | None) -> int:
    """Return a number that identifies an adapter."""
    return POLICY_KEY if adapter is None else adapter.version or BASE_KEY


def _mask(index_B: NDArray[np.int64], owners: tuple[int, ...]) -> mx.array | None:
    """Return which columns belong to the adapter of each row; None if all do."""
    mask_B_R = index_B[:, None] == np.array(owners, dtype=np.int64)[None]
    return None if mask_B_R.all() else mx.array(mask_B_R)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class LazyAdapterRows:
    """`AdapterRows`, made when it is first needed: it examines the model."""

    def __init__(self, adapters: AdapterStore | None) -> None:
        self._adapters = adapters
        self._rows: AdapterRows | None = None

    def prepare(self) -> AdapterRows:
        """Examine the model. Raises AdapterRequestError if its rows can only use the policy."""
        if self._rows is None:
            assert self._adapters is not None
            self._rows = AdapterRows(self._adapters)
        return self._rows

    def computing(self, adapter_B: Sequence[LoadedAdapter | None]) -> AbstractContextManager[None]:
        """Compute row b with adapter_B[b] inside the context."""
        return self.prepare().computing(adapter_B)

    def require(self, contents: AdapterContents) -> None:
        """Raise AdapterRequestError if the model does not compute with a layer of the adapter."""
        self.prepare().require(contents)

    def keep(self, versions: set[int]) -> None:
        """Release converted matrices of all adapters but these."""
        if self._rows is not None:
            self._rows.keep(versions)
