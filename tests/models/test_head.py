"""The split of models into blocks and head."""

from __future__ import annotations

import importlib
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map

from clotho.models.head import split_model
from clotho.models.parameters import flat
from clotho.scoring.token_scores import HeadScores, SampledTokens, SamplingDistribution, TokenScores
from tests import model_lanes
from tests.small_models import ARCHITECTURES, tiny
from tests.training.policies_and_groups import Bigram

VOCAB = 40
LAW = SamplingDistribution(0.7)
DENSE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "max_position_embeddings": 128,
    "rope_theta": 10000.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama untied": {"model_type": "llama", "tie_word_embeddings": False},
    "gemma2 soft cap": {"model_type": "gemma2", "final_logit_softcapping": 2.0},
    "cohere logit scale": {"model_type": "cohere", "logit_scale": 0.3, "layer_norm_eps": 1e-5, "use_qk_norm": False},
    "granite logits scaling": {
        "model_type": "granite", "logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    },
    "mamba2 recurrent": {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 16, "state_size": 8, "conv_kernel": 4, "expand": 2,
        "n_groups": 1, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
        "time_step_limit": (0.001, 0.1), "time_step_rank": "auto", "layer_norm_epsilon": 1e-5, "chunk_size": 16,
    },
}  # fmt: skip


def build(name: str) -> nn.Module:
    """Return an architecture of mlx-lm with random weights that are large enough to show its special operations."""
    config = DENSE | MODELS[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda array: array * 4.0 if array.ndim == 2 else array, model.parameters()))
    model.eval()
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_head_at_selected_positions_gives_the_models_logits(name: str) -> None:
    """With tied heads, soft caps, logit scales and recurrent blocks."""
    model = build(name)
    split = split_model(model, VOCAB)
    assert split is not None
    tokens_B_S = mx.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    chosen_N = mx.array([5, 0, 7, 10])
    logits_N_V = split.head(split.blocks(tokens_B_S).reshape(12, -1)[chosen_N])
    expected_N_V = model(tokens_B_S).reshape(12, -1)[chosen_N]
    np.testing.assert_allclose(np.array(logits_N_V), np.array(expected_N_V), rtol=1e-4, atol=1e-4)
    assert split.blocks(tokens_B_S).shape == (2, 6, 32)


def score(model: nn.Module, tokens_B_S: mx.array, position_N: mx.array, target_N: mx.array) -> TokenScores:
    """Return the scores of tokens after flat positions, through the halves."""
    split = split_model(model, VOCAB)
    assert split is not None
    hidden_N_D = split.blocks(tokens_B_S).reshape(tokens_B_S.size, -1)[position_N]
    return HeadScores(split, VOCAB)(hidden_N_D, SampledTokens(target_N, None, LAW))


@pytest.mark.parametrize(("name", "weights"), [("llama tied", ["model.embed_tokens"]), ("llama untied", ["lm_head"])])
def test_the_head_weights_are_its_own_or_tied_embeddings(name: str, weights: list[str]) -> None:
    """Tied embeddings belong to the blocks and count. The embeddings of an untied head and all layers do not."""
    split = split_model(build(name), VOCAB)
    assert split is not None
    assert list(split.head_weights()) == [f"{weight}.weight" for weight in weights]


def test_other_head_weights_apply_only_inside_the_context() -> None:
    """Twice the weights give twice the logits. Afterwards the model has its own weights."""
    split = split_model(Bigram(vocab_size=7), 7)
    assert split is not None
    hidden_N_D = mx.ones((2, 3))
    doubled = {name: 2 * array for name, array in split.head_weights().items()}
    before = split.head(hidden_N_D).tolist()
    with split.using(doubled):
        assert split.head(hidden_N_D).tolist() == (2 * mx.array(before)).tolist()
    assert split.head(hidden_N_D).tolist() == before


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_is_split_with_finite_gradients(architecture: str) -> None:
    """In training mode, for every weight. The gradient of padded rows equals that of unpadded ones."""
    model = tiny(architecture, vocab_size=VOCAB)
    model.train()

    def gradient(width: int) -> dict[str, mx.array]:
        def loss(traced: dict[str, Any]) -> mx.array:
            model.update(traced)
            tokens_B_S = mx.array([[3, 1, 4, 1, 5] + [0] * (width - 5), [2, 7, 1] + [0] * (width - 3)])
            position_N = mx.array([0, 1, 2, 3, 4, width, width + 1, width + 2])
            scores = score(model, tokens_B_S, position_N, mx.array([1, 4, 1, 5, 9, 7, 1, 8]))
            return mx.mean(scores.logp_N) + 0.1 * mx.mean(scores.entropy_N)

        parameters = model.trainable_parameters()
        arrays = flat(mx.grad(loss)(parameters))
        mx.eval(arrays)
        model.update(parameters)
        return arrays

    bare, padded = gradient(5), gradient(16)
    scale = max(float(np.abs(model_lanes.numpy(value)).max()) for value in bare.values())
    assert 1e-4 < scale < math.inf
    for name, value in bare.items():
        tolerance = model_lanes.rtol(2e-5) * max(1.0, scale)
        np.testing.assert_allclose(
            model_lanes.numpy(padded[name]), model_lanes.numpy(value), atol=tolerance, err_msg=name
        )


class Wrapper(nn.Module):
    """A model around a language model, as in vision models."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vision = nn.Linear(2, 2)
        self.language_model = Bigram(vocab_size=7)

    def __call__(self, tokens_B_S: mx.array, cache: Any = None) -> mx.array:
        return self.language_model(tokens_B_S)


def test_a_wrapped_language_model_is_split() -> None:
    """The submodule that returns the logits is split in its turn."""
    wrapper = Wrapper()
    split = split_model(wrapper, 7)
    assert split is not None
    assert split.blocks(mx.array([[1, 2]])).shape == (1, 2, 3)


class HeadOverTwoPositions(Bigram):
    """A model whose head reads two positions, so that it cannot run at selected positions."""

    def __call__(self, tokens_B_S: mx.array, cache: Any = None) -> mx.array:
        logits_B_S_V = super().__call__(tokens_B_S)
        return logits_B_S_V + mx.cumsum(logits_B_S_V, axis=1)


def test_a_head_over_several_positions_is_not_split() -> None:
    """The check on four tokens fails."""
    assert split_model(HeadOverTwoPositions(vocab_size=7), 7) is None


def test_the_model_is_restored_after_an_error_in_its_head() -> None:
    """The placeholder is removed."""
    model = Bigram(vocab_size=7)
    split = split_model(model, 7)
    assert split is not None
    with pytest.raises(ValueError, match="matmul"):
        split.head(mx.zeros((2, 99)))
    assert isinstance(model.model, nn.Embedding)
    assert model(mx.array([[1, 2]])).shape == (1, 2, 7)
