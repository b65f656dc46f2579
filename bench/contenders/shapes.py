"""Models for every contender on MLX: Qwen3 shapes with random weights, the embedded policy, and a real model.

Equal seeds give equal weights and prompts. Only the shape matters for speed and memory, and nothing is downloaded.
Works in both environments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import dequantize_model, load_model

EMBEDDED = "embedded"
REAL = "SmolLM2-135M"
REAL_DIRECTORY = "CLOTHO_BENCH_REAL_MODEL"
"""Environment variable with the model directory of `REAL`, as `python pipeline.py convert` writes it."""

DIRECTORY = Path(__file__).resolve().parents[2] / "profiles" / "embedded"


class Shape(NamedTuple):
    """The sizes that determine all weights; embeddings are tied."""

    layers: int
    width: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int


SHAPES = {"6m": Shape(6, 256, 4, 2, 768, 4096), "25m": Shape(8, 512, 8, 4, 1536, 8192)}
"""Shapes by name; `EMBEDDED`, the policy of the project, is the only one with trained weights."""


class Products(NamedTuple):
    """Number of weights that one token is multiplied with, in the blocks and in the output head."""

    blocks: int
    head: int


def configuration(shape: Shape) -> dict[str, Any]:
    """The model configuration for mlx-lm."""
    return {
        "model_type": "qwen3",
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.width // shape.heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }


def random_model(shape: Shape, *, seed: int = 0) -> Any:
    """The model in float32, evaluated."""
    mx.random.seed(seed)
    model: Any = qwen3.Model(qwen3.ModelArgs(**configuration(shape)))
    mx.eval(model.parameters())
    return model


def quantized_model(shape: Shape, *, seed: int = 0) -> Any:
    """The model with 4-bit weights in groups of 64 and bfloat16 elsewhere, evaluated."""
    model = random_model(shape, seed=seed)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def named_model(name: str, *, vocabulary: int = 0, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Model and configuration. name: also a model directory. vocabulary: overrides that of the shape unless 0.

    Raises KeyError for unknown names and ValueError if the embedded policy is requested with another vocabulary.
    """
    if name == REAL:
        return real_model(Path(os.environ[REAL_DIRECTORY]))
    if "/" in name:
        return load_model(Path(name))
    if name == EMBEDDED:
        model, config = load_model(DIRECTORY)
        if vocabulary not in (0, config["vocab_size"]):
            raise ValueError(f"the shipped policy has a vocabulary of {config['vocab_size']}, not {vocabulary}")
        return model, config
    shape = SHAPES[name]
    shape = shape._replace(vocabulary=vocabulary or shape.vocabulary)
    return random_model(shape, seed=seed), configuration(shape)


def real_model(directory: Path) -> tuple[Any, dict[str, Any]]:
    """The model of a directory, dequantized to float32 and evaluated."""
    model, config = load_model(directory)
    model = dequantize_model(model)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model, config


def random_prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts of uniformly sampled tokens."""
    tokens: list[list[int]] = np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()
    return tokens


def products(model: Any) -> Products:
    """Count the matrix weights of a model with tied embeddings."""
    parameters: Any = tree_flatten(model.parameters())
    sizes = {name: weight.size for name, weight in parameters if weight.ndim == 2}
    head = sizes.pop("model.embed_tokens.weight")
    return Products(blocks=sum(sizes.values()), head=head)
