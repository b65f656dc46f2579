"""The adapters of an engine: which of them a request names, and what loads them between two steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from attachments.adapters.adapter_rows import AdapterRows
from attachments.adapters.adapter_store import AdapterInfo, AdapterStore, LoadedAdapter
from clotho.inference.engine import DecodeEngine
from clotho.inference.parts import RowWeights
from clotho.inference.rows import RowAdapter
from clotho.models.lora import AdaptedModule
from clotho.models.policy_model import PolicyModel
from protocols.errors import AdapterRequestError, ProfileError, RequestError, visible
from protocols.sampling import POLICY
from training_run.adapters.contents import Adapter
from training_run.adapters.formats import LABELS
from training_run.adapters.reading import read_adapter_of
from training_run.start.adapter_settings import find_adapter


def read_chosen(path: Path, model: str, store: AdapterStore) -> Adapter:
    """Read an adapter that the operator names, in any of the forms of `policy.adapter`, in a compute thread.

    model: value of `model.path`. Raises an error with exit status 2, also for what cannot be served beside other
    adapters: magnitudes, weights in full, adapters of embeddings, and what exceeds the limits of the store.
    """
    flag = "--adapter"
    found = read_adapter_of(find_adapter(str(path), flag), model)
    if found.has_magnitudes or found.weights:
        what = LABELS[found.method] if found.has_magnitudes else "weights in full"
        raise ProfileError(f"{flag}: {path} has {what}; only LoRA can be served beside other adapters")
    if others := [module for module in found.ranks if module not in store.targets]:
        raise ProfileError(f"{flag}: {path} adapts {visible(others[0], 100)}, which is not served with adapters")
    for key, value in (("max_rank", found.rank), ("max_bytes", found.bytes)):
        if value > (limit := getattr(store.limits, key)):
            raise ProfileError(f"{flag}: {path} exceeds server.adapters.{key} = {limit}: it has {value}")
    return found


class AdapterWeights(RowWeights):
    """Rows compute with adapters of a store, with the base model, or with the policy.

    The model is examined when a request first names an adapter.
    """

    def __init__(self, store: AdapterStore, model: nn.Module, adapted: tuple[AdaptedModule, ...]) -> None:
        """adapted: modules of `model` that hold the policy's own adapter."""
        super().__init__()
        self.store = store
        self._provided: dict[str, LoadedAdapter] = {}
        self._model, self._adapted = model, adapted
        self._rows: AdapterRows | None = None

    @property
    def keeps_base(self) -> bool:
        """Whether the base weights are frozen."""
        return self.store.base is not None

    def admit(self, name: str) -> RowAdapter | None:
        """Return the newest version of an adapter, and count this as a use. Raises RequestError."""
        if name == POLICY:
            return None
        if name in self._provided:
            return self._provided[name]
        try:
            self.rows()
            return self.store.use(name)
        except AdapterRequestError as error:
            raise RequestError(str(error), param="model") from error

    def rows(self) -> AdapterRows:
        """Examine the model. Raises AdapterRequestError if its rows can only use the policy."""
        if self._rows is None:
            self._rows = AdapterRows(self._model, self._adapted, self.store.targets)
        return self._rows

    def computing(self, adapter_B: Sequence[RowAdapter | None]) -> AbstractContextManager[None]:
        """Compute row b with adapter_B[b] inside the context."""
        return self.rows().computing(adapter_B)

    def keep(self, versions: set[int]) -> None:
        """Release converted matrices of all adapters but these."""
        if self._rows is not None:
            self._rows.keep(versions)

    def of_copy(self, model: PolicyModel) -> RowWeights:
        """Return the adapters of the same store for a copy of the model."""
        return AdapterWeights(self.store, model.model, model.adapted)

    def read(self, path: Path, model: str) -> Adapter:
        """Read an adapter that the operator names."""
        return read_chosen(path, model, self.store)

    def load(self, name: str, contents: Adapter, *, protected: Collection[str]) -> None:
        """Load an adapter before the first request. Raises AdapterRequestError."""
        self.rows().require(contents)
        self.store.load(name, contents, protected=protected)

    @property
    def versions(self) -> frozenset[int]:
        """Versions of the adapters that requests can name."""
        return frozenset(
            (*(info.version for info in self.store.loaded()), *(a.version for a in self._provided.values()))
        )

    def provide(
        self, name: str, arrays: Mapping[str, mx.array], scales: Mapping[str, float], fingerprint: str
    ) -> tuple[RowAdapter | None, RowAdapter]:
        """Let requests name an adapter whose arrays belong to somebody else. Raises RequestError."""
        try:
            self.rows()
        except AdapterRequestError as error:
            raise RequestError(str(error), param="model") from error
        old = self._provided.get(name)
        self._provided[name] = new = self.store.provided(name, dict(arrays), scales, fingerprint)
        return old, new

    def withdraw(self, name: str) -> None:
        """Forget a provided adapter; its requests finish."""
        self._provided.pop(name, None)


class EngineAdapters:
    """Loads and unloads adapters of a running engine, in the decode thread."""

    def __init__(self, engine: DecodeEngine, weights: AdapterWeights) -> None:
        self.store = weights.store
        self._engine, self._weights = engine, weights

    @classmethod
    def of(cls, engine: object) -> EngineAdapters | None:
        """Return the adapters of an engine; None if all of its requests use the policy."""
        if not isinstance(engine, DecodeEngine) or not isinstance(engine.row_weights, AdapterWeights):
            return None
        return cls(engine, engine.row_weights)

    def load_adapter(
        self, name: str, contents: Adapter, *, replace: bool = False, protected: Collection[str] = ()
    ) -> AdapterInfo:
        """Load an adapter under a name. Arguments and errors are those of `AdapterStore.load`.

        Requests keep the version that they started with, unless `engine.kv_policy` is recompute.
        """
        old = self.store.find(name)
        self._weights.rows().require(contents)
        in_use = [adapter for adapter in self._engine.adapters_in_use() if isinstance(adapter, LoadedAdapter)]
        loaded = self.store.load(name, contents, replace=replace, protected=protected, in_use=in_use)
        if old is not None:
            self._engine.adapter_replaced(old, loaded)
        self._release()
        return loaded.info

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Forget the name of an adapter; its requests finish. Raises AdapterRequestError for an unknown name."""
        unloaded = self.store.unload(name)
        self._release()
        return unloaded.info

    def loaded_adapters(self) -> tuple[AdapterInfo, ...]:
        """Describe the loaded adapters, in the order of their names."""
        return self.store.loaded()

    def _release(self) -> None:
        """Free what belongs to adapters that are neither loaded nor in use."""
        self._engine.release_adapters(self._weights.versions)
