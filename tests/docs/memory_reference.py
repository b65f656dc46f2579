"""Generates the tables of memory estimates on docs/recipes.md, for a simulated Mac with 16 GB.

python -m tests.docs.memory_reference
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from protocols.summary import MemoryEstimate
from tests.docs.pages import DOCS, replace_between
from tests.models.simulated_devices import MAC_16_GB, simulate_gpu
from training_run.memory.estimate import estimate_memory
from training_run.profile.flags import parse_arguments
from training_run.profile.load import load_profile
from training_run.profile.schema import Profile

PAGE = DOCS / "recipes.md"
GIB = 2**30
LONG_SEQUENCE = 256 + 8192
"""Tokens of the longest sequence of `long-qwen3`."""

PROFILES = ("local-m3", "learn-m3", "qwen3-m3", "qwen35-m3", "qwen3-14b", "qwen3-30b-a3b", "long-qwen3", "gsm8k")


class MacRecipe(NamedTuple):
    """What a Mac trains. memory: of the Mac, in GB. command: the words after `clotho`."""

    memory: int
    task: str
    method: str
    command: str

    def profile(self) -> Profile:
        """Return the profile that the command trains."""
        arguments = parse_arguments(self.command.split())
        return load_profile(arguments.profile, arguments.overrides)


def _own(flags: str) -> str:
    return f"--profile {flags} --dataset my.jsonl"


def _long(model: str, rows: int) -> str:
    model_flag = f"long-qwen3 --model mlx-community/Qwen3-{model}-4bit"
    return _own(f"{model_flag} --engine.max-num-seqs {rows} --engine.kv-cache-tokens {rows * LONG_SEQUENCE}")


MACS = (
    MacRecipe(16, "own problems, 1,024 tokens", "QLoRA", _own("qwen3-m3")),
    MacRecipe(16, "own problems, 1,024 tokens, a hybrid model", "QLoRA", _own("qwen35-m3")),
    MacRecipe(16, "own problems, 8,192 tokens", "QLoRA", _long("0.6B", 4)),
    MacRecipe(16, "GSM8K", "LoRA", "--profile gsm8k"),
    MacRecipe(32, "own problems, 1,024 tokens", "QLoRA", _own("qwen3-m3 --model mlx-community/Qwen3-4B-4bit")),
    MacRecipe(32, "own problems, 8,192 tokens", "QLoRA", _long("4B", 4)),
    MacRecipe(32, "own problems", "QLoRA", _own("qwen3-14b")),
    MacRecipe(
        64, "GSM8K", "all weights", "--profile gsm8k --policy.method full --learner.optimizer.learning-rate 1e-6"
    ),
    MacRecipe(64, "own problems, 2,048 tokens, experts", "QLoRA", _own("qwen3-30b-a3b")),
    MacRecipe(64, "own problems, 8,192 tokens", "QLoRA", _long("14B", 6)),
    MacRecipe(128, "own problems, 8,192 tokens, experts", "QLoRA", _long("30B-A3B", 16)),
)
"""Recipes in the order of memory."""


def profile_table() -> str:
    """One row per profile."""
    rows = []
    for name in PROFILES:
        needed, model = _needed(load_profile(name))
        rows.append(f"| `{name}` | {model} | {needed.total / GIB:.1f} GiB | {needed.minimum / GIB:.1f} GiB |")
    return "\n".join(["| profile | model | at most | with one sequence |", "|---|---|---:|---:|", *rows])


def mac_table() -> str:
    """One row per recipe."""
    rows = []
    for recipe in MACS:
        needed, model = _needed(recipe.profile())
        rows.append(
            f"| {recipe.memory} GB | {model.rpartition('/')[2]} | {recipe.method} | {recipe.task} "
            f"| {needed.caches / GIB:.1f} GiB | {needed.total / GIB:.1f} GiB | `clotho {recipe.command}` |"
        )
    head = "| Mac | model | method | task | KV caches | at most | command |"
    return "\n".join([head, "|---|---|---|---|---:|---:|---|", *rows])


def _needed(profile: Profile) -> tuple[MemoryEstimate, str]:
    """Return estimate and model. Downloaded models are not read, so the tables are the same on every machine."""
    with TemporaryDirectory() as empty, pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", empty)
        simulate_gpu(patch, MAC_16_GB)
        return estimate_memory(profile.model, profile), profile.model.path.rpartition("profiles/")[2]


if __name__ == "__main__":
    replace_between(PAGE, "memory", profile_table())
    replace_between(PAGE, "macs", mac_table())
