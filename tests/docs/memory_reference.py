"""Generates the table of memory estimates on docs/recipes.md, for a simulated Mac with 16 GB.

python -m tests.docs.memory_reference
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import pytest

from tests.docs.pages import DOCS, replace_between
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile

PAGE = DOCS / "recipes.md"
GIB = 2**30
ROWS = (
    ("local-m3", ""),
    ("learn-m3", ""),
    ("qwen3-m3", ""),
    ("qwen3-m3", "mlx-community/Qwen3-4B-4bit"),
    ("qwen3-14b", ""),
)
"""Profile, and a model that replaces that of the profile."""


def table() -> str:
    """One row per profile and model. Downloaded models are not read, so that the table is the same on every machine."""
    lines = ["| profile | model | at most | with one sequence |", "|---|---|---:|---:|"]
    with TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
        simulate_gpu(patch, MAC_16_GB)
        lines += [_row(name, model) for name, model in ROWS]
    return "\n".join(lines)


def _row(name: str, model: str) -> str:
    profile = load_profile(name, {"model.path": model} if model else {})
    needed = estimate_memory(profile.model, profile)
    shown = model or profile.model.path.rpartition("profiles/")[2]
    return f"| `{name}` | {shown} | {needed.total / GIB:.1f} GiB | {needed.minimum / GIB:.1f} GiB |"


if __name__ == "__main__":
    replace_between(PAGE, "memory", table())
