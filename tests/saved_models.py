"""Tiny models on disk, with a tokenizer: what `load_policy` and `mlx_lm.load` read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3, qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import Tokenizer, models, pre_tokenizers

from tests import model_lanes

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}

UNTIED: dict[str, Any] = CONFIG | {"tie_word_embeddings": False}

MIXTURE: dict[str, Any] = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

TOKENS_1_T = mx.array([[5, 9, 33, 2, 17, 60]])


def build(config: dict[str, Any] = CONFIG, *, seed: int = 0) -> Any:
    """A model of `config` with random weights, in the precision of the lane (tests/model_lanes.py)."""
    return model_lanes.converted(_random(config, seed=seed))


def _random(config: dict[str, Any], *, seed: int = 0) -> Any:
    """A model of `config` with random weights in float32."""
    architecture = qwen3_moe if config["model_type"] == "qwen3_moe" else qwen3
    mx.random.seed(seed)
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def save(
    directory: Path,
    config: dict[str, Any] = CONFIG,
    *,
    bits: int | None = None,
    dtype: mx.Dtype | None = None,
    mixed: Callable[[str, Any], bool | dict[str, Any]] | None = None,
) -> Path:
    """Write a random model of `config` and a tokenizer to `directory`, in the form of the hub.

    bits: quantise; 0: do not. Without `bits` and `dtype`, the precision is that of the lane (tests/model_lanes.py).
    mixed: mlx-lm's predicate, which says how to quantise a layer of this name, if at all.
    """
    model = _random(config)
    lane = model_lanes.current()
    chosen = bits is not None or dtype is not None
    model.set_dtype(dtype or (mx.float32 if chosen else getattr(mx, lane.dtype)))
    written = dict(config)
    if width := (bits or 0) if chosen else lane.bits:
        size = 32 if chosen else model_lanes.GROUP_SIZE
        model, written = quantize_model(model, written, group_size=size, bits=width, quant_predicate=mixed)
    save_model(directory, model)
    save_config(written, directory / "config.json")
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 64 tokens."""
    vocabulary = {"<pad>": 0, "<end>": 1, "<unk>": 2} | {chr(ord("0") + i): 3 + i for i in range(61)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": "{%- for message in messages %}{{ message['content'] }}{%- endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
