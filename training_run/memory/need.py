"""What an estimate of memory assumes about a run or a server, as far as attachments decide it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from clotho.extension import Door
from clotho.inference.kv_format import PLAIN, KVFormat
from clotho.settings.engine import EngineSection
from training_run.profile.schema import Profile

if TYPE_CHECKING:
    import mlx.nn as nn


class MemoryNeed(Struct, kw_only=True):
    """Estimate -> attachments, which raise it.

    engine: settings of the decode engine. profile: of a run; None: a server without a learner. groups: groups of an
    update beside those of its batch. sequence_tokens: length of a sequence of which any part may be sampled; None: of a
    prompt with a completion. published: weights that are trained in full are kept until their next version. sums:
    gradients of several processes are added. step_tokens: tokens of a row that a decode step computes at most.
    draft_model: samples the others of these tokens; empty: no model does. teacher: a model that scores completions one
    by one; empty: none does. models: open further models without their weights. critic: a second adapter is trained.
    adapter_copies: arrays of the size of the adapter that the state of the optimizer has beside its own. rollbacks:
    older policies are kept. kv_format: how the KV caches of running rows hold keys and values.
    """

    engine: EngineSection
    profile: Profile | None = None
    groups: int = 0
    sequence_tokens: int | None = None
    published: bool = False
    sums: bool = False
    rollbacks: bool = False
    step_tokens: int = 1
    draft_model: str = ""
    teacher: str = ""
    models: list[Callable[[], tuple[nn.Module, Path]]] = field(default_factory=list)
    critic: bool = False
    adapter_copies: int = 0
    kv_format: KVFormat = PLAIN


MEMORY: Door[[MemoryNeed], None] = Door("attachment.memory")
"""Raises what the estimate assumes; a function of the settings in it."""


def memory_need(engine: EngineSection, profile: Profile | None = None) -> MemoryNeed:
    """Return what the attachments need for these settings."""
    need = MemoryNeed(engine=engine, profile=profile)
    MEMORY(need)
    return need
