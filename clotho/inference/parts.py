"""The parts of a decode engine that an attachment can provide: whose weights compute a row, and who makes batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.nn as nn

from clotho import extension
from clotho.inference.batch import Batch
from clotho.inference.cache_layout import CacheLayout, RowCaches, RowDecoder
from clotho.inference.kv_cache import BatchKVCache
from clotho.inference.row_weights import Computing, RowWeights
from clotho.inference.scheduler import Row
from clotho.models.lora import AdaptedModule
from clotho.settings.engine import EngineSection
from clotho.settings.server import AdaptersSection
from protocols.errors import ModelError
from protocols.summary import SpeculationCounts

MakeCaches = Callable[[int], RowCaches]
"""Returns KV caches for a number of rows."""


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
    """What an engine is made of. An extension replaces the parts that it provides.

    model: as mlx-lm builds it. adapted: its modules that hold the policy's own adapter. keeps_base: whether training
    leaves the base weights as they are. adapters: limits of the adapters that requests can name; None: all requests use
    the policy.
    """

    model: nn.Module
    settings: EngineSection
    adapted: tuple[AdaptedModule, ...] = ()
    keeps_base: bool = True
    adapters: AdaptersSection | None = None
    rows: RowWeights = field(default_factory=RowWeights)
    batches: Batches = field(default_factory=Batches)

    def extended(self) -> EngineParts:
        """Let every extension provide its parts. Raises ModelError, also if a setting needs an absent attachment."""
        if self.adapters is not None:
            self.rows = RowWeights(f"a model beside the policy {extension.needs('adapters')}")
        for one in extension.extensions():
            one.engine(self)
        if self.adapters is not None and self.adapters.root and type(self.rows) is RowWeights:
            raise ModelError(f"server.adapters.root {extension.needs('adapters')}")
        return self
