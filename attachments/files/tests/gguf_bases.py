"""Tiny models in directories whose tokenizers llama.cpp has."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import quantize_model, save_model
from tokenizers import Tokenizer

from attachments.files.tests.gguf_files import CONFIG, CONTROL

TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"


def save(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    dtype: mx.Dtype = mx.float32,
    bits: int = 0,
    special: dict[str, str] | None = None,
    **settings: Any,
) -> Path:
    """Write a model with random weights. bits: quantize it in groups of 32. special: tokens of the tokenizer."""
    config = CONFIG | settings
    module: Any = importlib.import_module(f"mlx_lm.models.{config['model_type'].replace('mistral', 'llama')}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update({"model": {"norm": {"weight": mx.random.uniform(0.5, 1.5, (config["hidden_size"],))}}})
    model.set_dtype(dtype)
    if bits:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    save_model(directory, model)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(directory / "tokenizer.json"))
    named = special or {"bos_token": CONTROL[0], "eos_token": CONTROL[1], "chat_template": TEMPLATE}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory
