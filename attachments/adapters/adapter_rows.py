"""One forward pass whose rows use different adapters, the policy, or the base model.

The layers of `attachments.adapters.mixed_layers` replace those of the model only while the graph of such a pass is
built: passes in which all rows use the policy, and training, compute with the unchanged model. The matrices of the
adapters of a pass are joined once, in a bank, and banks are kept between passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from numpy.typing import NDArray

from attachments.adapters.mixed_layers import Columns, Group, Layer, Mixed, MixedLinear, MixedSwitchLinear, Routed
from clotho.inference.rows import RowAdapter
from clotho.models.lora import AdaptedModule
from clotho.models.module_calls import watched_calls
from clotho.models.parameters import locate
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError
from training_run.adapters.contents import Adapter, adapter_targets
from training_run.adapters.reading import FLOAT32_BYTES

RowAdapters = Sequence[RowAdapter | None]
"""The adapter of every row; None for the policy."""

KEPT_BANKS = 2
"""Number of banks of several adapters that are kept."""

LARGEST_EXCESS = 4
"""A bank is used for a subset of its adapters if it has at most this many times the columns of the subset."""

POLICY_KEY, BASE_KEY = 0, -1
"""Numbers that identify the policy and the base model; the number of an adapter is its version."""


class Bank(NamedTuple):
    """The columns of several adapters for every group. policy: matrices of the policy that they were built from."""

    adapters: tuple[RowAdapter | None, ...]
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


def adapter_bytes(model: nn.Module, limits: AdaptersSection, itemsize: int) -> int:
    """Return the bytes of the largest adapters that the limits allow, with their copies in the compute type.

    The device path keeps one copy of each adapter, and `KEPT_BANKS` copies for passes with several adapters.
    """
    targets = adapter_targets(model).values()
    per_rank = sum(max(1, one.experts) * (one.inputs + one.outputs) for one in targets)
    loaded = min(limits.max_bytes, limits.max_loaded * limits.max_rank * per_rank * FLOAT32_BYTES)
    return loaded + (1 + KEPT_BANKS) * loaded * itemsize // FLOAT32_BYTES


class AdapterRows:
    """Computes rows with different adapters in one pass of the model, and belongs to the thread of the model."""

    def __init__(self, model: nn.Module, adapted_modules: Sequence[AdaptedModule], targets: Iterable[str]) -> None:
        """Find the layers that read the same input by one call of the model, which is not evaluated.

        adapted_modules: modules of `model` that hold the policy's adapter. targets: names of layers with adapters.
        """
        adapted = {module.name: module for module in adapted_modules}
        layers, modules = {}, []
        for name in targets:
            parent, key = locate(model, name)
            base = adapted[name].base if name in adapted else parent[key]
            layers[name] = Layer(name, parent, key, base, adapted[name].adapted if name in adapted else None)
            modules.append(parent[key])
        by_module = {id(module): layer for module, layer in zip(modules, layers.values(), strict=True)}
        with watched_calls(modules) as calls:
            model(mx.zeros((1, 2), dtype=mx.int32))
        self._experts = _experts(model)
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

    def require(self, contents: Adapter) -> None:
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

    def _bank(self, rows: Mapping[int, RowAdapter | None], policy: tuple[mx.array, ...]) -> Bank:
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

    def _columns(self, adapters: Mapping[int, RowAdapter | None]) -> int:
        """Return how many columns of A the adapters have in all layers."""
        layers = [layer for group in self._groups for layer in group.layers]
        return sum(layer.rank(adapter) for layer in layers for adapter in adapters.values())

    def _build(self, adapters: Sequence[RowAdapter | None], policy: tuple[mx.array, ...]) -> Bank:
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


def _key(adapter: RowAdapter | None) -> int:
    """Return a number that identifies an adapter."""
    return POLICY_KEY if adapter is None else adapter.version or BASE_KEY


def _mask(index_B: NDArray[np.int64], owners: tuple[int, ...]) -> mx.array | None:
    """Return which columns belong to the adapter of each row; None if all do."""
    mask_B_R = index_B[:, None] == np.array(owners, dtype=np.int64)[None]
    return None if mask_B_R.all() else mx.array(mask_B_R)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
