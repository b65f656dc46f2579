"""Adapters for tests: directories in the formats of mlx-lm and PEFT, and what mlx-lm computes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters
from safetensors.numpy import save_file

from attachments.adapters.adapter_weights import EngineAdapters
from clotho.inference.engine import DecodeEngine
from clotho.models.adapter_formats import Target
from clotho.models.adapters import adapter_targets
from clotho.settings.server import AdaptersSection
from tests.inference.engine_helpers import ENGINE
from tests.small_models import FixedSource, tiny

ATTENTION_ONLY = ("q_proj", "v_proj")
LIMITS = AdaptersSection()


def random_matrices(
    targets: Mapping[str, Target], rank: int, *, seed: int, modules: Sequence[str] = (), size: float = 0.3
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return random A and B for all layers of the blocks whose name ends in one of `modules`; all without names."""
    random = np.random.default_rng(seed)
    arrays = {}
    for name, target in sorted(targets.items()):
        if name.rpartition(".")[2] not in modules if modules else "layers." not in name:
            continue
        for matrix in ("lora_a", "lora_b"):
            shape = target.shape(matrix, rank)
            arrays[f"{name}.{matrix}"] = (size * random.standard_normal(shape)).astype(np.float32)
    return arrays


def write_mlx_adapter(
    directory: Path,
    model: nn.Module,
    *,
    rank: int = 4,
    scale: float = 1.0,
    seed: int = 1,
    modules: Sequence[str] = (),
    size: float = 0.3,
) -> Path:
    """Write an adapter as mlx-lm does. size: standard deviation of the matrices."""
    arrays = random_matrices(adapter_targets(model), rank, seed=seed, modules=modules, size=size)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(arrays, directory / "adapters.safetensors")
    names = {name.rpartition(".lora_")[0] for name in arrays}
    keys = sorted({name.partition("layers.")[2].partition(".")[2] or name for name in names})
    config = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def engine_with_adapters(
    source: FixedSource, adapters: Mapping[str, Path], *, limits: AdaptersSection = LIMITS, **settings: Any
) -> tuple[DecodeEngine, EngineAdapters]:
    """Return an engine over `source` with these adapters loaded."""
    engine = DecodeEngine(source, ENGINE(**settings), limits)
    loaded = adapters_of(engine)
    for name, path in adapters.items():
        loaded.load_adapter(name, loaded.store.read(path))
    return engine, loaded


def adapters_of(engine: DecodeEngine) -> EngineAdapters:
    """Return the adapters of an engine that has limits for them."""
    found = EngineAdapters.of(engine)
    assert found is not None
    return found


def generated(
    architecture: str, adapter: Path | None, prompt: Sequence[int], tokens: int, **overrides: Any
) -> list[int]:
    """Return what mlx-lm generates greedily with an adapter, with mlx-lm's own layers on a fresh model."""
    model = tiny(architecture, vocab_size=257, **overrides)
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=tokens)
    return [int(token) for token, _ in steps]
