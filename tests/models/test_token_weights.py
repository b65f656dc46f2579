"""Embeddings and heads are found in every architecture, whatever they are called."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from clotho.models.lora import token_weights
from protocols.errors import ModelError
from tests.small_models import ARCHITECTURES, tiny

GPT2: dict[str, Any] = {
    "n_ctx": 64,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 32,
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_found_turns_tokens_into_vectors_and_vectors_into_logits(architecture: str) -> None:
    """Doubling an embedding or the head moves the logits; no other matrix of that height is left."""
    model = tiny(architecture)
    tokens_1_T = mx.array([[3, 5, 8]])
    before = model(tokens_1_T)
    found = token_weights(model, embeddings=True, head=False)
    assert len(found) == 1
    (embedding,) = found.values()
    assert type(embedding) is nn.Embedding
    embedding.weight = embedding.weight * mx.array([[2.0 if i % 2 else 0.5] for i in range(64)])
    assert not mx.allclose(model(tokens_1_T), before).item()
    tall = [name for name, module in model.named_modules() if getattr(module, "weight", before).shape[0] == 64]
    try:
        head = token_weights(model, embeddings=False, head=True)
    except ModelError:
        head = {}
    assert sorted([*found, *head]) == sorted(name for name in tall if name.count("layers") == 0)


def gpt2() -> Any:
    """Embeddings of tokens and of positions, a tied head; nothing evaluated."""
    module = importlib.import_module("mlx_lm.models.gpt2")
    return module.Model(module.ModelArgs.from_dict({"model_type": "gpt2", **GPT2}))


def test_an_embedding_of_positions_is_none_of_tokens() -> None:
    """GPT-2 has both, and ties its head."""
    assert list(token_weights(gpt2(), embeddings=True, head=False)) == ["model.wte"]
    with pytest.raises(
        ModelError, match=r"policy\.method\.train_head: .*tied.*policy\.method\.train_embeddings = true trains both"
    ):
        token_weights(gpt2(), embeddings=True, head=True)


def test_watching_leaves_no_trace_and_computes_nothing() -> None:
    """Classes are the library's again, and weights that were not read yet stay unread."""
    model = gpt2()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    token_weights(model, embeddings=True, head=False)
    assert mx.get_peak_memory() < held + model.model.wte.weight.nbytes
    assert {type(model.model.wte), type(model.model.wpe)} == {nn.Embedding}
