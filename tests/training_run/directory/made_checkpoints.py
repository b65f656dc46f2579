"""Small checkpoints, and their damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from protocols.accounting import LedgerState
from protocols.checkpoint import AdapterConfig, LoRAParameters, RunState
from training_run.directory.checkpoints import Snapshot

ADAPTER = AdapterConfig(
    fine_tune_type="lora",
    num_layers=-1,
    lora_parameters=LoRAParameters(rank=2, scale=10.0, dropout=0.0, keys=("q_proj",)),
)


def state(step: int, **changes: Any) -> RunState:
    """Return the state of a run after `step` steps."""
    base = RunState(
        step=step,
        version=step,
        fingerprint="f",
        ledger=LedgerState(all_ended_below=7, ended_above=(9, 12), trained=6, discarded={"stale": 3}),
        prompted=20,
        random_state=(0, 2**32 - 1),
        bad_steps=1,
        train_seconds=0.1 + 0.2,
        sampled_tokens=10**12,
        trained_tokens=5,
        inputs={"model": "m", "dataset": "d"},
    )
    return msgspec.structs.replace(base, **changes)


def parameters(value: float = 1.5) -> dict[str, Any]:
    """Return a small tree with an empty branch."""
    tree = {"layers": [{}, {"lora_a": mx.full((3, 2), value), "lora_b": mx.full((2, 3), value, dtype=mx.bfloat16)}]}
    mx.eval(tree)
    return tree


def snapshot(step: int, value: float = 1.5) -> Snapshot:
    """Return a snapshot."""
    optimizer = {"step": mx.array(step, dtype=mx.uint64), "layers.1.lora_a.m": mx.full((3, 2), value)}
    mx.eval(optimizer)
    return Snapshot(parameters=parameters(value), optimizer=optimizer, state=state(step), adapter_config=ADAPTER)


def names(directory: Path) -> list[str]:
    """Return the names of all entries, including hidden ones."""
    return sorted(path.name for path in directory.iterdir())


def corrupt(path: Path) -> None:
    """Change one byte in the middle of a file."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
