"""Shapes of Qwen3 with random weights, for every contender that runs MLX: equal seeds, equal weights and prompts.

What matters for speed and memory is the shape; nothing needs a download. Works in both environments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import load_model

EMBEDDED = "embedded"
DIRECTORY = Path(__file__).resolve().parents[2] / "profiles" / "embedded"


class Shape(NamedTuple):
    """What the sizes of all weights follow from; embeddings are tied."""

    layers: int
    width: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int


SHAPES = {"6m": Shape(6, 256, 4, 2, 768, 4096), "25m": Shape(8, 512, 8, 4, 1536, 8192)}
"""By name; beside them there is `EMBEDDED`, the policy that is shipped, whose weights are not random."""


class Products(NamedTuple):
    """Weights that one token is multiplied with: in the blocks, and in the head that scores the vocabulary."""

    blocks: int
    head: int


def configuration(shape: Shape) -> dict[str, Any]:
    """What mlx-lm makes the model of."""
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


def named_model(name: str, *, vocabulary: int = 0, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Model and configuration. vocabulary: instead of the shape's own, unless 0.

    Raises KeyError for other names, and ValueError for a vocabulary that the shipped policy does not have.
    """
    if name == EMBEDDED:
        model, config = load_model(DIRECTORY)
        if vocabulary not in (0, config["vocab_size"]):
            raise ValueError(f"the shipped policy has a vocabulary of {config['vocab_size']}, not {vocabulary}")
        return model, config
    shape = SHAPES[name]
    shape = shape._replace(vocabulary=vocabulary or shape.vocabulary)
    return random_model(shape, seed=seed), configuration(shape)


def random_prompts(count: int, length: int, vocabulary: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts of tokens sampled evenly from the vocabulary."""
    tokens: list[list[int]] = np.random.default_rng(seed).integers(0, vocabulary, (count, length)).tolist()
    return tokens


def products(model: Any) -> Products:
    """Count the matrices of a model whose head is its embeddings."""
    parameters: Any = tree_flatten(model.parameters())
    sizes = {name: weight.size for name, weight in parameters if weight.ndim == 2}
    head = sizes.pop("model.embed_tokens.weight")
    return Products(blocks=sum(sizes.values()), head=head)
