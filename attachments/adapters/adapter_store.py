"""The adapters that are served beside the policy: loaded by name, limited in number and size, replaced as a whole.

A store belongs to the decode thread. `read` may run in any thread, so that a large file delays no decode step.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from msgspec import Struct

from clotho.models.lora import AdaptedModule
from clotho.models.parameters import Arrays, fingerprint
from clotho.settings.server import AdaptersSection
from protocols.errors import AdapterRequestError, did_you_mean, visible
from protocols.sampling import BASE
from training_run.adapters.contents import Adapter, adapter_targets
from training_run.adapters.reading import read_adapter


class AdapterInfo(Struct, frozen=True, kw_only=True):
    """A loaded adapter.

    version: number of the load; a reload in place has a greater one. fingerprint: of the float32 weights and scales.
    rank: the largest rank of any module. targets: names of the adapted modules, sorted. path: the directory that the
    weights were read from. bytes: size of the float32 weights.
    """

    name: str
    version: int
    fingerprint: str
    rank: int
    targets: tuple[str, ...]
    path: str
    bytes: int


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""Names of adapters. Names that begin with another character are reserved, such as `POLICY` and `BASE`."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class LoadedAdapter:
    """One version of an adapter. Requests keep the version that they started with.

    version: number of the load; no other adapter of the store has it, and later loads have greater numbers.
    arrays: the float32 matrices `MODULE.lora_a` and `MODULE.lora_b` in mlx-lm's layout. scales: the absolute scale of
    each module.
    """

    name: str
    version: int
    fingerprint: str
    rank: int
    path: str
    arrays: Arrays = field(repr=False)
    scales: Mapping[str, float] = field(repr=False)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the adapted modules, sorted."""
        return tuple(sorted(self.scales))

    @property
    def bytes(self) -> int:
        """Size of the matrices."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def info(self) -> AdapterInfo:
        """The description for clients."""
        return AdapterInfo(**{name: getattr(self, name) for name in AdapterInfo.__struct_fields__})


class AdapterStore:
    """Loaded adapters by name, the least recently used one first.

    If the limits are exceeded, the least recently used adapters without requests are evicted, except those that the
    load protects. Replaced and unloaded versions count until the last of their requests ends.

    targets: the linear layers of the model. adapted: modules that hold the policy's own adapter.
    base: the base model as an adapter without matrices; None if the base weights are trained in full.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: AdaptersSection,
        *,
        adapted: tuple[AdaptedModule, ...] = (),
        base_is_served: bool = True,
    ) -> None:
        """adapted: modules that hold the policy's own adapter. base_is_served: whether the base weights are frozen."""
        self.limits = limits
        self.targets = adapter_targets(model, adapted)
        self._loads = count(1)
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self.base = self._adapter(BASE, 0, {}, {}, 0, "") if base_is_served else None

    def read(self, directory: Path) -> Adapter:
        """Read and validate an adapter directory, in any thread. Raises AdapterRequestError."""
        return read_adapter(directory, self.targets, self.limits)

    def load(
        self,
        name: str,
        contents: Adapter,
        *,
        replace: bool = False,
        protected: Collection[str] = (),
        in_use: Collection[LoadedAdapter] = (),
    ) -> LoadedAdapter:
        """Load an adapter under a name.

        replace: load a new version if the name is taken. protected: names that this load does not evict. in_use:
        adapters of unfinished requests, which are not evicted. Raises AdapterRequestError, and changes nothing, for an
        invalid name, a name that is taken (`exists`), or without space (`full`).
        """
        if not NAME.fullmatch(name):
            raise AdapterRequestError(
                f"{visible(name, 60)!r} is no adapter name: use up to 128 letters, digits and . _ : / -, "
                "beginning with a letter or digit",
                reason="invalid",
            )
        if name in self._loaded and not replace:
            raise AdapterRequestError(f"the adapter {name} is already loaded; set load_inplace", reason="exists")
        evicted = self._to_evict(name, contents.bytes, in_use, protected)
        arrays = {key: mx.array(values) for key, values in contents.arrays.items()}
        mx.eval(arrays)
        adapter = self._adapter(name, next(self._loads), arrays, contents.scales, contents.rank, str(contents.path))
        for other in evicted:
            self.unload(other)
        self._loaded.pop(name, None)
        self._loaded[name] = adapter
        return adapter

    def _adapter(
        self, name: str, version: int, arrays: Arrays, scales: Mapping[str, float], rank: int, path: str
    ) -> LoadedAdapter:
        digest = fingerprint({"arrays": arrays, "scales": {key: mx.array(scales[key]) for key in scales}})
        return LoadedAdapter(name, version, digest if arrays else "", rank, path, arrays, scales)

    def provided(self, name: str, arrays: Arrays, scales: Mapping[str, float], fingerprint: str) -> LoadedAdapter:
        """Return an adapter that the store does not hold, with a version of its own. arrays: evaluated."""
        rank = max(array.shape[-1] for key, array in arrays.items() if key.endswith("lora_a"))
        return LoadedAdapter(name, next(self._loads), fingerprint, int(rank), "", arrays, scales)

    def _to_evict(
        self, name: str, size: int, in_use: Collection[LoadedAdapter], protected: Collection[str]
    ) -> list[str]:
        """Return the adapters that must leave before `size` bytes can be loaded under `name`."""
        others = {other: adapter for other, adapter in self._loaded.items() if other != name}
        busy = {adapter.version: adapter for adapter in in_use}
        evicted: list[str] = []
        held = busy | {adapter.version: adapter for adapter in others.values()}
        total = size + sum(adapter.bytes for adapter in held.values())
        for other, adapter in others.items():
            if total <= self.limits.max_bytes and len(others) - len(evicted) < self.limits.max_loaded:
                break
            if adapter.version not in busy and other not in protected:
                evicted.append(other)
                total -= adapter.bytes
        limits, remedy = self.limits, "all have requests or are kept; raise it, or unload an adapter"
        if len(others) - len(evicted) >= limits.max_loaded:
            full = f"{len(others)} adapters are loaded, as many as server.adapters.max_loaded permits"
            raise AdapterRequestError(f"{full}, and {remedy}", reason="full")
        if total > limits.max_bytes:
            full = (
                f"no space for {size} bytes: {total - size} of server.adapters.max_bytes = {limits.max_bytes} are used"
            )
            raise AdapterRequestError(f"{full}, and {remedy}", reason="full")
        return evicted

    def unload(self, name: str) -> LoadedAdapter:
        """Forget a name. Unfinished requests keep the adapter. Raises AdapterRequestError for an unknown name."""
        adapter = self._get(name)
        del self._loaded[name]
        return adapter

    def use(self, name: str) -> LoadedAdapter:
        """Return the newest version, and count this as a use. Raises AdapterRequestError for an unknown name."""
        if name == BASE:
            if self.base is None:
                raise AdapterRequestError(
                    "the base model is not served, because the policy trains its weights", reason="unknown"
                )
            return self.base
        adapter = self._get(name)
        self._loaded.move_to_end(name)
        return adapter

    def _get(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            shown = visible(name, 60)
            hint = did_you_mean(name, self._loaded)
            raise AdapterRequestError(f"no adapter named {shown!r} is loaded{hint}", reason="unknown")
        return self._loaded[name]

    def find(self, name: str) -> LoadedAdapter | None:
        """Return the newest version, if the name is loaded; this does not count as a use."""
        return self._loaded.get(name)

    def loaded(self) -> tuple[AdapterInfo, ...]:
        """Describe the loaded adapters, in the order of their names."""
        return tuple(self._loaded[name].info for name in sorted(self._loaded))
