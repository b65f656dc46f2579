"""Adapters for tests: directories in the formats of mlx-lm and PEFT, and what mlx-lm computes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.utils import load_adapters
from safetensors.numpy import save_file

from attachments.adapters.adapter_weights import EngineAdapters
from clotho.inference.engine import DecodeEngine
from clotho.settings.server import AdaptersSection
from protocols.sampling import Completion
from tests import model_lanes
from tests.inference.engine_helpers import ENGINE, full_logits, log_softmax
from tests.small_models import FixedSource, tiny
from training_run.adapters.contents import adapter_targets
from training_run.adapters.formats import Target

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


def check_greedy(completion: Completion, architecture: str, adapter: Path | None, prompt: Sequence[int]) -> None:
    """Compare a greedy completion with mlx-lm's own layers and the adapter loaded by mlx-lm, on a fresh model.

    The log-probabilities are equal, and every token is the most probable one, both up to the mean rounding of a token.
    In 16 bits the engine's adapters are in 16 bits and those of mlx-lm in float32, so that single tokens differ by more
    than a token of equal matrices.
    """
    model = tiny(architecture, vocab_size=257)
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    tokens, tolerance = list(completion.tokens), model_lanes.atol(1e-4)
    logits_T_V = full_logits(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    logp_T_V = np.array([log_softmax(logits_V) for logits_V in logits_T_V])
    logp_T = logp_T_V[np.arange(len(tokens)), tokens]
    assert np.abs(logp_T - np.array(completion.logprobs)).mean() <= tolerance
    assert (logp_T_V.max(axis=-1) - logp_T).mean() <= tolerance
