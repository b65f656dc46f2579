"""Tiny models with the configuration of a hub repository: mlx-lm, transformers and llama.cpp's converter read them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model, save_model

from tests.saved_models import save_tokenizer
from tests.small_models import ARCHITECTURES, ATTENTION, tiny

SHAPES = ("llama", "qwen3", "gemma2")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "sliding_window": 512, "tie_word_embeddings": True,
    },
    "qwen3_moe": {"moe_intermediate_size": 16, "decoder_sparse_step": 1},
}  # fmt: skip
TOKENS = (5, 9, 33, 2, 17, 60, 41)

PYTHON = "CLOTHO_PEFT_PYTHON"
"""Variable that names an interpreter with PyTorch, transformers and PEFT."""

LLAMA_CPP = "CLOTHO_LLAMA_CPP_PYTHON"
"""Variable that names an interpreter with xllamacpp, which contains llama.cpp."""


def config_of(architecture: str, **settings: Any) -> dict[str, Any]:
    """The configuration of a tiny model."""
    return {
        "architectures": [CLASSES.get(architecture, architecture)], "model_type": architecture, **ATTENTION,
        **ARCHITECTURES[architecture], "vocab_size": 64, **OTHER_SETTINGS.get(architecture, {}), **settings,
    }  # fmt: skip


def save(directory: Path, architecture: str, *, bits: int = 0, dtype: mx.Dtype = mx.float32, **settings: Any) -> Path:
    """Write a tiny model. bits: quantize it in groups of 32."""
    config = config_of(architecture, **settings)
    overrides = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = tiny(architecture, **overrides)
    model.set_dtype(dtype)
    if bits:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    save_model(directory, model)
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory)
    return directory


def logits(model: Any) -> np.ndarray[Any, Any]:
    """The logits of `TOKENS`, as float32."""
    return np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))


def python_with(variable: str) -> str:
    """The interpreter that an environment variable names; skip the test without it."""
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"{variable} does not name an interpreter")
    return python


def run_jobs(python: str, module: str, jobs: object, directory: Path) -> None:
    """Run a module of the tests in another interpreter; its jobs are in a file of `directory`."""
    file = directory / f"{module}.json"
    file.write_text(json.dumps(jobs))
    command = [python, str(Path(__file__).with_name(f"{module}.py")), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr[-3000:]
