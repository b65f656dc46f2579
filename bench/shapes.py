"""Policies of random weights in the shape of Qwen3: what matters for speed and memory, without a download."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import qwen3

from actors.compute.policy import Policy
from protocols.profile import PolicySection


def random_policy(
    *, layers: int, width: int, heads: int, key_heads: int, feed_forward: int, vocabulary: int, seed: int = 0
) -> Policy:
    """A policy with an adapter over every linear layer of its blocks, embeddings tied, in float32."""
    config = {
        "model_type": "qwen3",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width // heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))  # type: ignore[no-untyped-call]
    mx.eval(model.parameters())  # type: ignore[no-untyped-call]
    return Policy(model, cast(Any, None), PolicySection(), config=config, seed=seed, keep_reference=False)
