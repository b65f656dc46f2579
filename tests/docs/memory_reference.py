"""Generates the tables of memory estimates on docs/recipes.md, for a simulated Mac with 16 GB.

python -m tests.docs.memory_reference
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any

import pytest

from protocols.summary import MemoryEstimate
from tests.docs.pages import DOCS, replace_between
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

PAGE = DOCS / "recipes.md"
GIB = 2**30
LONG_SEQUENCE = 256 + 8192
"""Tokens of the longest sequence of `long-qwen3`."""

ROWS = (
    ("local-m3", ""),
    ("learn-m3", ""),
    ("qwen3-m3", ""),
    ("qwen3-m3", "mlx-community/Qwen3-4B-4bit"),
    ("qwen35-m3", ""),
    ("qwen3-14b", ""),
    ("qwen3-30b-a3b", ""),
    ("gsm8k", ""),
)
"""Profile, and a model that replaces that of the profile."""


LONG = ((16, "Qwen3-0.6B-4bit", 4), (32, "Qwen3-4B-4bit", 4), (64, "Qwen3-14B-4bit", 6))
"""Memory of a Mac in GB, a model, and the number of rows that `long-qwen3` decodes with them."""


def table() -> str:
    """One row per profile and model."""
    rows = []
    for name, model in ROWS:
        needed, shown = _needed(name, {"model.path": model} if model else {})
        rows.append(f"| `{name}` | {shown} | {needed.total / GIB:.1f} GiB | {needed.minimum / GIB:.1f} GiB |")
    return "\n".join(["| profile | model | at most | with one sequence |", "|---|---|---:|---:|", *rows])


def long_table() -> str:
    """One row per size of a Mac."""
    rows = []
    for memory, model, seqs in LONG:
        needed, shown = _needed("long-qwen3", long_settings(model, seqs))
        rows.append(
            f"| {memory} GB | {shown} | {seqs} | {needed.caches / GIB:.1f} GiB | {needed.total / GIB:.1f} GiB |"
        )
    return "\n".join(["| Mac | model | `max_num_seqs` | KV caches | at most |", "|---|---|---:|---:|---:|", *rows])


def long_settings(model: str, seqs: int) -> dict[str, Any]:
    """Return the keys of `long-qwen3` that change for a model and a number of rows."""
    return {
        "model.path": f"mlx-community/{model}",
        "engine.max_num_seqs": seqs,
        "engine.kv_cache_tokens": seqs * LONG_SEQUENCE,
    }


def _needed(name: str, overrides: dict[str, Any]) -> tuple[MemoryEstimate, str]:
    """Return estimate and model. Downloaded models are not read, so the tables are the same on every machine."""
    with TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
        simulate_gpu(patch, MAC_16_GB)
        profile = load_profile(name, overrides)
        return estimate_memory(profile.model, profile), profile.model.path.rpartition("profiles/")[2]


if __name__ == "__main__":
    replace_between(PAGE, "memory", table())
    replace_between(PAGE, "long", long_table())
