"""A step on the host gives the logits of the model itself, with the weights of that moment."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from attachments.cpu.backend import is_supported
from attachments.cpu.decoder_layers import cosines_and_sines, rotate
from attachments.cpu.layers import install_cpu_layers, rope_frequencies
from attachments.cpu.tests.supported_models import SUPPORTED, adapt, host_rows, plain_source
from protocols.sampling import Sampling
from tests.inference.engine_helpers import log_softmax, make_engine, make_prompt, submit_request, tick_until

pytestmark = pytest.mark.needs_cpu_path

LENGTHS = (9, 1, 30, 2)
"""Of prompts; the shortest brings nothing that was computed."""


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_steps_of_rows_of_different_lengths_give_the_models_own_logits(
    architecture: str, tied: bool, adapted: bool
) -> None:
    """For each row those of one full forward pass over its tokens, step after step."""
    model = plain_source(architecture, tie_word_embeddings=tied).model
    if adapted:
        adapt(model)
    rows = host_rows(model, len(LENGTHS))
    for slot, length in enumerate(LENGTHS):
        rows.enter([slot], make_prompt(length, slot))
    for _ in range(3):
        rows.check_step()


EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"head_dim": 12, "rope_theta": 500.0, "rms_norm_eps": 0.1}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3, "mlp_only_layers": [0]}),
        ("qwen3_5_moe", EXPERTS),
    ],
    ids=[
        *("biases", "slower rotation", "a key head per query", "one key head", "wide heads"),
        *("probabilities that do not add up", "a shared expert"),
    ],
)
def test_shapes_and_constants_are_the_models(architecture: str, overrides: dict[str, object]) -> None:
    """What a configuration of Llama's, and of models with experts, may ask for."""
    model = plain_source(architecture, **overrides).model
    assert is_supported(model)
    rows = host_rows(model, 2)
    rows.enter([0], make_prompt(20))
    rows.enter([1], make_prompt(7, 1))
    rows.check_step()
    rows.check_step()


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_layers_that_the_cpu_backend_put_in_are_decoded_as_well(architecture: str) -> None:
    """Weights that lie by inputs, and the backend's own norms, rotations and low-rank layers."""
    model = plain_source(architecture).model
    model.freeze()
    adapt(model)
    install_cpu_layers(model)
    rows = host_rows(model, 2)
    rows.enter([0], make_prompt(20))
    rows.enter([1], make_prompt(7, 1))
    rows.check_step()


def test_rows_outgrow_their_columns_without_a_trace() -> None:
    """Buffers are replaced twice, and what rows hold moves along."""
    rows = host_rows(plain_source("qwen3").model, 2)
    rows.enter([0], make_prompt(20))
    rows.enter([1], make_prompt(7, 1))
    capacities = set()
    for _ in range(150):
        rows.step()
        capacities.add(rows.cache.capacity)
    assert len(capacities) == 3
    rows.check_step()


def test_logits_are_the_callers() -> None:
    """The next step writes elsewhere: sampling uses up what it is given."""
    rows = host_rows(plain_source("qwen3").model, 1)
    rows.enter([0], make_prompt(9))
    first = rows.step()
    kept = first.copy()
    first += 1.0
    second = rows.step()
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept + 1.0)


@pytest.mark.parametrize(("size", "scale"), [(8, 1.0), (8, 0.25), (6, 1.0)])
def test_rotation_is_mlxs_by_halves(size: int, scale: float) -> None:
    """Every head of a row turns by the row's position, or its first numbers do."""
    x_B_N_D = np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    position_B = np.array([0, 5, 411], np.int32)
    rope: Any = nn.RoPE(size, base=1000.0, scale=scale)
    expected_B_N_1_D = rope(mx.array(x_B_N_D)[:, :, None], offset=mx.array(position_B))
    frequency_H = np.array(rope_frequencies(size, 1000.0)) * np.float32(scale)
    rotate(x_B_N_D, *cosines_and_sines(position_B, frequency_H))
    np.testing.assert_allclose(x_B_N_D, np.array(expected_B_N_1_D)[:, :, 0], atol=2e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_new_weights_serve_from_the_very_next_token(architecture: str, tied: bool) -> None:
    """Its log-probability is that of the new weights over what the old ones left in the cache."""
    source = plain_source(architecture, tie_word_embeddings=tied)
    adapt(source.model)
    engine = make_engine(source)
    prompt, sampled = make_prompt(8), 5
    answer = submit_request(
        engine, prompt, Sampling(temperature=0.0, max_tokens=sampled + 1, ignore_eos=True), stream=True
    )
    tick_until(engine, lambda: engine.stats().tokens_sampled == sampled)
    *before, last = (*prompt, *(event.token for event in answer.streamed()))
    cache = make_prompt_cache(source.model)
    mx.eval(source.model(mx.array([before]), cache=cache), [layer.state for layer in cache])
    source.model.update(tree_map(lambda a: a * mx.linspace(1.4, 0.6, a.shape[-1]), source.model.parameters()))
    source.version += 1
    engine.weights_changed("keep")
    tick_until(engine, lambda: bool(answer.completions))
    twin = log_softmax(np.array(source.model(mx.array([[last]]), cache=cache)[0, -1]).astype(np.float64))
    completion = answer.completions[0]
    assert completion.versions == (0,) * sampled + (1,)
    assert completion.tokens[-1] == int(twin.argmax())
    np.testing.assert_allclose(completion.logprobs[-1], twin.max(), atol=1e-4)
