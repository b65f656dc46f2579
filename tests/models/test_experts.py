"""Mixtures of experts: routers stay frozen, adapters of experts share the rank, and tokens of experts are counted."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRASwitchLinear

from clotho.models.experts import EXPERTS, configuration_of, expert_load, experts_per_token, router_names
from clotho.models.lora import install_adapter, linear_modules
from clotho.models.module_calls import watched_calls
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.model import Lora
from tests.small_models import tiny
from training_run.adapters.contents import adapter_targets, reached_share

MIXTURES = {
    "qwen3_moe": {"mlp.gate"},
    "mixtral": {"block_sparse_moe.gate"},
    "gpt_oss": {"mlp.router"},
    "kimi_linear": {"mlp.gate"},
    "qwen3_next": {"mlp.gate", "mlp.shared_expert_gate"},
}


@pytest.mark.parametrize(("architecture", "routers"), MIXTURES.items())
def test_routers_have_no_adapter_unless_they_are_named(architecture: str, routers: set[str]) -> None:
    """All other linear layers have one by default, those of experts and shared experts included."""
    model = tiny(architecture)
    layers = linear_modules(model.layers)
    assert router_names(layers) == routers
    config, _ = install_adapter(model, Lora(), seed=0)
    assert config.lora_parameters is not None
    assert set(config.lora_parameters.keys) == layers.keys() - routers
    config, _ = install_adapter(tiny(architecture), Lora(target_modules=tuple(routers)), seed=0)
    assert config.lora_parameters is not None
    assert set(config.lora_parameters.keys) == routers


@pytest.mark.parametrize("architecture", ["qwen3", "falcon_h1", "lfm2"])
def test_dense_models_have_no_routers(architecture: str) -> None:
    """Whatever their layers are called."""
    assert router_names(linear_modules(tiny(architecture).layers)) == set()


@pytest.mark.parametrize("architecture", MIXTURES)
def test_the_configuration_states_how_many_experts_compute_a_token(architecture: str) -> None:
    """As many as a call of the model chooses."""
    model = tiny(architecture)
    with watched_calls([module for module in model.modules() if isinstance(module, EXPERTS)]) as calls:
        model(mx.zeros((1, 3), dtype=mx.int32))
    assert {call.result.shape[-2] for call in calls} == {experts_per_token(configuration_of(model))}


def test_the_experts_of_a_token_share_the_rank() -> None:
    """With 2 of 4 experts per token and rank 6, an expert has rank 3; with rank 1, 1; `ranks` names another one."""
    for rank, ranks, expected in ((6, (), 3), (1, (), 1), (6, ("up_proj=5",), 5)):
        model = tiny("qwen3_moe")
        _, adapted = install_adapter(model, Lora(rank=rank, ranks=ranks), seed=0)
        layers = {one.name: one.adapted for one in adapted}
        up = layers["model.layers.0.mlp.switch_mlp.up_proj"]
        assert isinstance(up, LoRASwitchLinear)
        assert up.lora_a.shape[:2] == (4, expected)
        assert layers["model.layers.0.self_attn.q_proj"].lora_a.shape[1] == rank


def test_the_reached_share_counts_the_experts_of_one_token() -> None:
    """Attention alone, in one of two blocks: its weights over those of both blocks with 2 of 4 experts each."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = tiny("qwen3_moe")
    attention = sum(model.layers[0].self_attn[name].weight.size for name in names)
    mixture = model.layers[0].mlp
    expert, router = 3 * mixture.switch_mlp.up_proj.weight[0].size, mixture.gate.weight.size
    _, adapted = install_adapter(model, Lora(target_modules=names, num_layers=1), seed=0)
    found = reached_share(adapter_targets(model, adapted), [one.name for one in adapted], 2)
    assert found == pytest.approx(attention / (2 * (attention + 2 * expert + router)))


def test_the_load_of_experts_counts_weighted_tokens() -> None:
    """Two layers of 3 and 2 experts, one expert per token; the weight of all tokens is last."""
    choices_N_C = mx.array([[0, 1], [2, 1], [2, 0]])
    load = expert_load(choices_N_C, [3, 2], mx.array([1.0, 1.0, 0.5]))
    assert load.tolist() == [1.0, 0.0, 1.5, 0.5, 2.0, 2.5]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_every_layout_counts_the_same_tokens_of_experts(layout: str) -> None:
    """Those that predict trained tokens, as the experts of the whole sequences choose them one by one."""
    model = tiny("qwen3_moe")
    pairs = [((3, 9, 4), (5, 6, 1, 2)), ((3, 9, 4), (8, 8)), ((7,), (2, 30, 31))]
    sequences = [
        scored_only(prompt, tokens)._replace(loss_mask_T=np.ones(len(tokens), dtype=np.float32), group=len(prompt))
        for prompt, tokens in pairs
    ]
    expected = mx.zeros(2 * 4)
    for prompt, tokens in pairs:
        with watched_calls([block.mlp.gate for block in model.layers]) as calls:
            model(mx.array([[*prompt, *tokens[:-1]]]))
        for layer, call in enumerate(calls):
            chosen_T_2 = mx.argpartition(call.result[0], kth=-2, axis=-1)[len(prompt) - 1 :, -2:]
            expected = expected.at[chosen_T_2 + 4 * layer].add(mx.ones(chosen_T_2.shape))
    forcing = TeacherForcing(model, 64, layout=layout)
    (micro,) = build_micro_batches(sequences, layout=layout, budget=1000)
    _, metrics = forcing.with_experts(micro, distribution=SamplingDistribution(1.0))
    assert mx.array_equal(metrics["expert_load"], mx.concatenate([expected, mx.array([9.0])])).item()
