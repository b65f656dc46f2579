"""Write a model directory for the servers: every server loads the same files, and no response ends early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model, save_config, save_model

from bench.contenders.shapes import DIRECTORY, EMBEDDED, named_model

NEVER_SAMPLED = "<|endoftext|>"
"""A padding token that the policy does not sample."""
VOCABULARY = 384
"""Vocabulary size of the embedded tokenizer."""


def write_model(name: str, target: Path) -> Path:
    """Write a model of `bench.contenders.shapes` with the embedded tokenizer.

    The end token is one that is never sampled, so that all responses have the requested length; only random weights
    sample it occasionally. Thinking tags are renamed to ordinary text, because some servers remove them from responses.
    """
    shutil.copytree(DIRECTORY, target)
    if name != EMBEDDED:
        model, config = named_model(name, vocabulary=VOCABULARY)
        save_model(target, model)
        save_config(config, target / "config.json")
    for file in ("config.json", "generation_config.json"):
        _change(target / file, eos_token_id=0)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        _change(target / file, eos_token=NEVER_SAMPLED)
    tokenizer = target / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8").replace("<think>", "<work>").replace("</think>", "</work>")
    tokenizer.write_text(text, encoding="utf-8")
    return target


def write_adapter(model: Path, target: Path, *, rank: int = 8) -> Path:
    """Write a random LoRA adapter of mlx-lm for every linear layer in the blocks of a model directory."""
    network, _ = load_model(model, lazy=True)
    layers = {
        name: module.weight.shape
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    arrays = {}
    for number, (name, (outputs, inputs)) in enumerate(layers.items()):
        key = mx.random.key(number)
        arrays[f"{name}.lora_a"] = mx.random.normal((inputs, rank), key=key) * inputs**-0.5
        arrays[f"{name}.lora_b"] = mx.random.normal((rank, outputs), key=key) * 0.02
    keys = sorted({name.split(".layers.")[1].partition(".")[2] for name in layers})
    parameters = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    target.mkdir()
    mx.save_safetensors(str(target / "adapters.safetensors"), arrays)
    (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def _change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}), encoding="utf-8")
