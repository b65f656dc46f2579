"""The parts of a decode engine that an attachment can provide: whose weights compute a row, and who makes batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from clotho.backend import backend
from clotho.extension import Door, needs
from clotho.inference.batch import Batch
from clotho.inference.cache_layout import CacheLayout, Computing, RowCaches
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.kv_format import PLAIN, KVFormat
from clotho.inference.prefill import RowDecoder
from clotho.inference.rows import RowAdapter
from clotho.inference.scheduler import Row
from clotho.models.lora import AdaptedModule
from clotho.models.policy_model import PolicyModel
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from protocols.compute import SpeculationCounts
from protocols.errors import ModelError, ProfileError, RequestError
from protocols.sampling import POLICY

MakeCaches = Callable[[int], RowCaches]
"""Returns KV caches for a number of rows."""


class RowWeights:
    """Every row computes with the policy; a subclass lets requests name others. Belongs to the model's thread."""

    def __init__(self, refusal: str = "this engine samples from the policy only") -> None:
        """refusal: what a request for other weights is told."""
        self._refusal = refusal

    @property
    def keeps_base(self) -> bool:
        """Whether a weight swap of the policy leaves the weights of all other rows as they are."""
        return True

    def admit(self, name: str) -> RowAdapter | None:
        """Return what a request names, as `SampleRequest.weights`; None for the policy. Raises RequestError."""
        if name != POLICY:
            raise RequestError(self._refusal, param="model")
        return None

    def computing(self, adapter_B: Sequence[RowAdapter | None]) -> AbstractContextManager[None]:
        """Compute row b of a forward pass of the model with adapter_B[b] inside the context."""
        return nullcontext()

    def keep(self, versions: set[int]) -> None:
        """Release what was prepared for all adapters but these versions."""

    def of_copy(self, model: PolicyModel) -> RowWeights:
        """Return the same weights for a copy of the model, which may belong to another thread."""
        return self

    def read(self, path: Path, model: str) -> Any:
        """Read an adapter that the operator names, in any form of `policy.adapter`. model: value of `model.path`.

        Raises an error with exit status 2, also for what cannot be served beside the policy.
        """
        raise ProfileError(f"--adapter: {path}: {self._refusal}")

    def load(self, name: str, contents: Any, *, protected: Collection[str]) -> None:
        """Load what `read` has returned, before the first request, and evict no `protected` name. Raises as `read`."""
        raise ProfileError(f"--adapter: {name}: {self._refusal}")

    @property
    def versions(self) -> frozenset[int]:
        """Versions of the adapters that requests can name."""
        return frozenset()

    def provide(
        self, name: str, arrays: Mapping[str, mx.array], scales: Mapping[str, float], fingerprint: str
    ) -> tuple[RowAdapter | None, RowAdapter]:
        """Let requests name arrays that somebody else owns, evaluated; return what the name was, and the adapter."""
        raise RequestError(self._refusal, param="model")

    def withdraw(self, name: str) -> None:
        """Forget a provided adapter; its requests finish. An unknown name is ignored."""


class Batches:
    """Makes the KV caches and the batches of one engine, in which every step samples one token per row."""

    @property
    def counts(self) -> SpeculationCounts:
        """Drafts and their accepted tokens since the engine was created."""
        return SpeculationCounts()

    def caches(self, layout: CacheLayout, decoder: RowDecoder | None, limit: int) -> MakeCaches:
        """Return what makes KV caches of at most `limit` tokens. decoder: of a backend; None without one."""
        return decoder.caches if decoder is not None else lambda rows: BatchKVCache(layout, rows, limit)

    def pair(
        self, make_caches: MakeCaches, end_tokens: frozenset[int], vocabulary: int, computing: Computing
    ) -> tuple[Batch, Batch]:
        """Return empty batches for short rows and for long rows; arguments are those of `Batch`. Called once."""
        return (
            Batch(make_caches, end_tokens, vocabulary, computing),
            Batch(make_caches, end_tokens, vocabulary, computing),
        )

    def finished(self, row: Row) -> None:
        """Observe a completion that has finished."""


@dataclass(slots=True, kw_only=True)
class EngineParts:
    """What an engine is made of. An attachment replaces the parts that it provides.

    model: as mlx-lm builds it. adapted: its modules that hold the policy's own adapter. keeps_base: whether training
    leaves the base weights as they are. adapters: limits of the adapters that requests can name; None: all requests use
    the policy. kv_format: how the KV caches of running rows hold keys and values.
    """

    model: nn.Module
    settings: EngineSection
    adapted: tuple[AdaptedModule, ...] = ()
    keeps_base: bool = True
    adapters: AdaptersSection | None = None
    rows: RowWeights = field(default_factory=RowWeights)
    batches: Batches = field(default_factory=Batches)
    kv_format: KVFormat = PLAIN

    def decoder(self, layout: CacheLayout) -> RowDecoder | None:
        """Hold keys and values as `kv_format` says; return what decodes rows instead of the model, if anything does.

        A backend's decoder holds keys and values in their own type, so that MLX decodes packed ones. Raises ModelError.
        """
        if not self.kv_format.is_packed:
            return backend().row_decoder(self.model)
        layout.hold(self.kv_format)
        return None

    def extended(self) -> EngineParts:
        """Let every attachment provide its parts. Raises ModelError, also if a setting needs an absent attachment."""
        if self.adapters is not None:
            self.rows = RowWeights(f"a model beside the policy {needs('adapters')}")
        ENGINE(self)
        if self.adapters is not None and self.adapters.root and type(self.rows) is RowWeights:
            raise ModelError(f"server.adapters.root {needs('adapters')}")
        return self


ENGINE: Door[[EngineParts], None] = Door("library.engine")
"""Replaces parts of a decode engine; called once per engine, in its thread. Raises ModelError."""
