"""A checkpointer and its updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
from msgspec import Struct

from actors.checkpointer import Checkpointer
from protocols.checkpoint import AdapterConfig, Part
from protocols.step import PolicyUpdated
from tests.actors.actor_helpers import policy_updated
from tests.training_run.directory.made_checkpoints import ADAPTER, state
from training_run.directory.best_checkpoint import BestCheckpointKeeper
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import records_of
from training_run.profile.schema import CheckpointSection
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue


def parameters(value: float = 0.0) -> dict[str, Any]:
    """Return a small parameter tree."""
    tree = {"layers": [{}, {"lora_a": mx.full((3, 2), value), "lora_b": mx.full((2, 3), value)}]}
    mx.eval(tree)
    return tree


class Kept(Struct, frozen=True, kw_only=True):
    """What an attachment keeps in a checkpoint."""

    step: int


def update(step: int) -> PolicyUpdated:
    """Return the update of a step. Every parameter equals `step`."""
    return policy_updated(
        parameters(float(step)), step=step, version=step, optimizer=parameters(-float(step)), random_state=(1, 2),
        parts={"one": Part(value=Kept(step=step))},
    )  # fmt: skip


def checkpointer_of(
    directory: Path,
    updates: Queue[PolicyUpdated],
    *,
    logged: int = 1000,
    parts: CheckpointParts | None = None,
    **settings: Any,
) -> Checkpointer:
    """Return a checkpointer whose logs are written up to step `logged`."""
    cell = Latest[int]("logged")
    cell.put(logged)
    return Checkpointer(
        inbox=updates.inbox(),
        directory=directory / "checkpoints",
        newest=directory / ".newest_checkpoint",
        histories=[directory / "metrics.jsonl"],
        adapter_directories=[directory / "adapters", directory / "elsewhere"],
        adapter_config=ADAPTER,
        run_id="run",
        settings=CheckpointSection(**settings),
        best=BestCheckpointKeeper(
            checkpoints=directory / "checkpoints",
            marker=directory / "best.json",
            reports=lambda: (),
            is_evaluated=lambda step: False,
        ),
        state=lambda update: state(update.report.step),
        logged=cell,
        parameters=parameters(0.0),
        loadable=as_they_are,
        records=lambda step: records_of("steps = 9", directory / "metrics.jsonl", step),
        parts=parts or CheckpointParts({}),
    )


async def as_they_are(parameters: Any) -> tuple[Any, AdapterConfig]:
    """Return the settings of an adapter that mlx-lm loads."""
    return parameters, ADAPTER
