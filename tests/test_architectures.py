"""Models that people train on Macs: hybrids and mixtures of experts, from a saved model to a saved adapter."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from msgspec.structs import replace

import clotho
from clotho.models.lora import TOKEN_LOOPS, install_adapter, open_all_weights
from clotho.settings.model import Lora
from protocols.errors import ModelError
from tests.saved_models import save_tokenizer
from tests.small_models import configuration, tiny

PROMPT = (5, 9, 33, 2, 17, 60)
LORA = clotho.LoRA(rank=2, scale=4.0)
MODELS = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_moe",
    "gpt_oss",
    "gemma4_text",
    "kimi_linear",
    "mamba2",
    "falcon_h1",
    "lfm2",
)


def saved(directory: Path, architecture: str, **sizes: Any) -> Path:
    """Write a tiny random model as it is on the hub."""
    save_model(directory, tiny(architecture, **sizes))
    save_config(configuration(architecture, 64) | sizes, directory / "config.json")
    save_tokenizer(directory)
    return directory


def logprobs(model: Path, adapter: Path, tokens: tuple[int, ...]) -> np.ndarray:
    """Return the log-probabilities of tokens after the prompt, as mlx-lm computes them with the adapter."""
    served = load_adapters(load_model(model)[0], str(adapter))
    logits_S_V = served(mx.array([PROMPT + tokens[:-1]]))[0, len(PROMPT) - 1 :].astype(mx.float32)
    logp_S_V = logits_S_V - mx.logsumexp(logits_S_V, axis=-1, keepdims=True)
    return np.array(mx.take_along_axis(logp_S_V, mx.array(tokens)[:, None], axis=1))[:, 0]


@pytest.mark.parametrize("architecture", MODELS)
def test_a_saved_model_is_sampled_trained_and_saved(tmp_path: Path, architecture: str) -> None:
    """Two updates: sampler and learner agree, a restored learner has the same bits, and mlx-lm reads the adapter.

    Their mismatch is the mean of r - 1 - log r over the tokens, with r the learner's probability by the sampler's.
    """
    model = saved(tmp_path / "model", architecture)
    policy = clotho.load(str(model), method=LORA)
    learner = clotho.Learner(policy)
    with clotho.Sampler(policy) as sampler:
        for step in range(2):
            (group,) = sampler.sample([PROMPT], clotho.Sampling(max_tokens=20), n=4, seed=step)
            data = [clotho.Datum(PROMPT, *one) for one in zip(group, (1.0, -1.0, 0.5, -0.5), strict=True)]
            log_ratio_N = np.concatenate(learner.forward(data)) - np.concatenate([one.logprobs for one in group])
            assert np.abs(log_ratio_N).max() < 1e-4
            assert np.mean(np.expm1(log_ratio_N) - log_ratio_N) < 1e-9
            learner.save_state(tmp_path / "state.safetensors")
            learner.forward_backward(data)
            learner.optim_step(learning_rate=0.01)
            sampler.publish(learner)
    after = learner.forward(data)
    assert np.abs(np.subtract(after[0], group[0].logprobs)).max() > 1e-3
    adapter = learner.save(tmp_path / "adapter")
    np.testing.assert_allclose(logprobs(model, adapter, tuple(group[0].tokens)), after[0], atol=1e-4)
    restored = clotho.Learner(clotho.load(str(model), method=LORA))
    restored.load_state(tmp_path / "state.safetensors")
    restored.forward_backward(data)
    restored.optim_step(learning_rate=0.01)
    assert restored.fingerprint == learner.fingerprint


def test_the_text_part_of_a_model_with_a_vision_tower_is_loaded(tmp_path: Path) -> None:
    """As Qwen3.5 is published: names of transformers, the settings of the text in `text_config`, and a vision tower."""
    model = tiny("qwen3_5")
    tokens = mx.array([[5, 9, 33]])
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    names = {name: name.replace("language_model.model.", "model.language_model.") for name in arrays}
    tensors = {names[name].replace("language_model.lm_head", "lm_head"): array for name, array in arrays.items()}
    tower = {f"model.visual.blocks.{number}.attn.qkv.weight": mx.zeros((8, 8)) for number in range(3)}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors | tower)
    text = configuration("qwen3_5", 64) | {"model_type": "qwen3_5_text"}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 3, "hidden_size": 8}}
    save_config(config, tmp_path / "config.json")
    save_tokenizer(tmp_path)
    policy = clotho.load(str(tmp_path), method=clotho.LoRA(rank=2))
    with clotho.Sampler(policy) as sampler:
        ((completion,),) = sampler.sample([(5, 9, 33)], clotho.Sampling(max_tokens=1), n=1, seed=0)
    logits_V = model(tokens)[0, -1]
    expected = logits_V[completion.tokens[0]] - mx.logsumexp(logits_V)
    assert completion.logprobs[0] == pytest.approx(float(expected), abs=1e-4)


def test_a_learner_of_the_library_replays_the_routes_of_its_sampler(tmp_path: Path) -> None:
    """In gradients of every loss, and in log-probabilities: routes of another completion change them."""
    policy = clotho.load(str(saved(tmp_path, "qwen3_moe")), method=clotho.LoRA(rank=2))
    learner = clotho.Learner(policy, router_replay="on")
    with clotho.Sampler(policy) as sampler:
        ((one, other),) = sampler.sample([PROMPT], clotho.Sampling(max_tokens=12, ignore_eos=True), n=2, seed=0)
    data = [clotho.Datum(PROMPT, one, advantage=1.0)]
    np.testing.assert_allclose(learner.forward(data)[0], one.logprobs, atol=1e-4)
    swapped = [clotho.Datum(PROMPT, replace(one, routes=other.routes), advantage=1.0)]
    assert np.abs(np.subtract(learner.forward(swapped)[0], one.logprobs)).max() > 1e-3
    assert (
        learner.forward_backward(data, "cross_entropy").loss != learner.forward_backward(swapped, "cross_entropy").loss
    )


def test_gpt_oss_is_trained_with_its_mxfp4_weights(tmp_path: Path) -> None:
    """The experts stay packed, sampler and learner agree, and mlx-lm computes with the adapter."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config = configuration("gpt_oss", 64) | sizes
    quantized, config = quantize_model(tiny("gpt_oss", **sizes), config, 32, 4, mode="mxfp4")
    save_model(tmp_path / "model", quantized)
    save_config(config, tmp_path / "model" / "config.json")
    save_tokenizer(tmp_path / "model")
    policy = clotho.load(str(tmp_path / "model"), method=clotho.LoRA(rank=2, scale=4.0))
    learner = clotho.Learner(policy)
    with clotho.Sampler(policy) as sampler:
        (group,) = sampler.sample([PROMPT], clotho.Sampling(max_tokens=12), n=2, seed=0)
    data = [clotho.Datum(PROMPT, one, advantage) for one, advantage in zip(group, (1.0, -1.0), strict=True)]
    for completion, logp in zip(group, learner.forward(data), strict=True):
        np.testing.assert_allclose(completion.logprobs, logp, atol=1e-4)
    learner.forward_backward(data)
    learner.optim_step(learning_rate=0.01)
    adapter = learner.save(tmp_path / "adapter")
    found = logprobs(tmp_path / "model", adapter, tuple(group[0].tokens))
    np.testing.assert_allclose(found, learner.forward(data)[0], atol=1e-4)


@pytest.mark.parametrize("name", TOKEN_LOOPS)
def test_models_whose_layers_are_loops_over_tokens_are_refused(name: str) -> None:
    """By name, with what to use, before anything is computed: an adapter and all weights."""
    architecture = import_module(f"mlx_lm.models.{name}").Model
    model: nn.Module = architecture.__new__(architecture)
    for train in (open_all_weights, lambda model: install_adapter(model, Lora(), seed=0)):
        with pytest.raises(ModelError, match=rf"architecture {name} .*token by token.*use .* qwen3_5"):
            train(model)
