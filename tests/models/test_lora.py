"""Installing what is trained: the right layers, and a clear refusal of anything else."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from clotho.config.sections_data import Lora
from clotho.models.lora import (
    install_adapter,
    is_quantized,
    linear_modules,
    module_ranks,
    open_all_weights,
    token_weights,
)
from clotho.models.parameters import flat, nested
from protocols.errors import ModelError
from tests.learner_settings import adapter_settings
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, UNTIED, build
from tests.small_models import ARCHITECTURES, tiny


def trainable(model: Any) -> dict[str, mx.array]:
    """Trainable parameters by name."""
    return flat(model.trainable_parameters())


def test_every_linear_layer_of_a_block_is_adapted_by_default() -> None:
    """Attention and feed-forward projections of all blocks; no embedding, no norm."""
    model = build()
    config, adapted = install_adapter(model, Lora(), seed=0)
    assert config.lora_parameters is not None
    assert config.lora_parameters.keys == (
        "mlp.down_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "self_attn.k_proj",
        "self_attn.o_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    )
    assert len(adapted) == 2 * 7
    assert len(trainable(model)) == 2 * 2 * 7


def test_experts_are_adapted_too() -> None:
    """A mixture's stacked expert weights take low-rank layers of their own."""
    model = build(MIXTURE)
    install_adapter(model, adapter_settings(rank=3), seed=0)
    assert trainable(model)["model.layers.0.mlp.switch_mlp.up_proj.lora_a"].shape == (4, 3, 64)


@pytest.mark.parametrize(("num_layers", "blocks"), [(-1, {"0", "1"}), (1, {"1"}), (2, {"0", "1"})])
def test_blocks_are_counted_from_the_last(num_layers: int, blocks: set[str]) -> None:
    """As mlx-lm counts; -1 is all of them."""
    model = build()
    install_adapter(model, adapter_settings(num_layers=num_layers), seed=0)
    assert {name.split(".")[2] for name in trainable(model)} == blocks


@pytest.mark.parametrize("num_layers", [0, 3])
def test_an_impossible_number_of_blocks_is_refused(num_layers: int) -> None:
    """0 would mean all of them to mlx-lm, and 3 of 2 is a mistake."""
    with pytest.raises(ModelError, match="has 2 blocks"):
        install_adapter(build(), adapter_settings(num_layers=num_layers), seed=0)


def test_scale_and_alpha_reach_the_layers() -> None:
    """mlx-lm's scale is absolute; alpha is divided by the rank, and for rsLoRA by its root (arXiv:2312.03732)."""
    for section, scale in (
        (adapter_settings(scale=3.0), 3.0),
        (adapter_settings(alpha=32.0, rank=16), 2.0),
        (adapter_settings(alpha=32.0, rank=16, scaling="rank_stabilized"), 8.0),
    ):
        model = build()
        install_adapter(model, section, seed=0)
        assert model.layers[0].self_attn.q_proj.scale == scale


def test_a_quantised_base_takes_adapters_and_nothing_else() -> None:
    """QLoRA: packed weights have no gradient, so full training is refused with the way out."""
    model, _ = quantize_model(build(), dict(CONFIG), group_size=32, bits=4)
    assert is_quantized(model)
    with pytest.raises(ModelError, match=r"cannot be trained in full: use policy\.method = lora"):
        open_all_weights(model)
    install_adapter(model, Lora(), seed=0)
    assert trainable(model)["model.layers.0.self_attn.q_proj.lora_a"].shape == (64, 8)
    assert {name.rsplit(".", 1)[1] for name in trainable(model)} == {"lora_a", "lora_b"}


def test_full_training_opens_floating_parameters_only() -> None:
    """A parameter of integers has no gradient and stays frozen."""
    model = build()
    model.layers[0].mlp.table = mx.array([1, 2, 3])
    open_all_weights(model)
    assert "model.layers.0.mlp.table" not in trainable(model)
    assert len(trainable(model)) == len(flat(model.parameters())) - 1


def test_dora_trains_a_magnitude_of_every_output_too() -> None:
    """It starts as the norm of the weight's row (arXiv:2402.09353, section 4.3), so version 0 is the base."""
    model = build()
    before: mx.array = model(TOKENS_1_T)
    weight_O_I = model.layers[0].self_attn.k_proj.weight
    config, adapted = install_adapter(model, adapter_settings(kind="dora", rank=4), seed=0)
    arrays = trainable(model)
    assert config.fine_tune_type == "dora"
    assert len(arrays) == 3 * len(adapted) == 3 * 2 * 7
    magnitude_O = arrays["model.layers.0.self_attn.k_proj.m"]
    assert mx.allclose(magnitude_O, mx.sqrt((weight_O_I * weight_O_I).sum(axis=1))).item()
    assert mx.allclose(model(TOKENS_1_T), before, rtol=1e-5, atol=1e-6).item()


def test_dora_computes_the_papers_equation() -> None:
    """Each row of W + scale (A B)^T is scaled to the length m; the layer's bias is added after."""
    layer = nn.Linear(6, 5)
    model = build()
    model.layers[0].self_attn.q_proj = layer
    install_adapter(model, adapter_settings(kind="dora", rank=2, scale=3.0), seed=0)
    adapted = model.layers[0].self_attn.q_proj
    adapted.lora_b, adapted.m = mx.random.normal((2, 5)), mx.random.uniform(1, 2, (5,))
    a, b, m, w, bias = (np.array(x) for x in (adapted.lora_a, adapted.lora_b, adapted.m, layer.weight, layer.bias))
    direction = w + 3.0 * (a @ b).T
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    expected = x @ (m[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)).T + bias
    np.testing.assert_allclose(np.array(adapted(mx.array(x))), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_every_kind_of_parameter_has_a_gradient(kind: Any) -> None:
    """Off its start, where B = 0 and A has none: low-rank matrices, magnitudes, embeddings and head."""
    model = build(UNTIED)
    install_adapter(model, adapter_settings(kind=kind, train_embeddings=True, train_head=True), seed=0)
    moved = {name: array + 0.05 for name, array in trainable(model).items()}
    model.update(nested(moved))
    gradients = nn.value_and_grad(model, lambda: (model(TOKENS_1_T) ** 2).mean())()[1]
    assert flat(gradients).keys() == moved.keys()
    assert all(mx.any(gradient != 0).item() for gradient in flat(gradients).values())


def test_dropout_acts_on_the_adapters_input_in_both_kinds() -> None:
    """In training mode only."""
    for kind in ("lora", "dora"):
        model = build()
        install_adapter(model, adapter_settings(kind, dropout=0.5), seed=0)
        model.update(nested({name: array + 0.05 for name, array in trainable(model).items()}))
        plain = model(TOKENS_1_T)
        assert mx.array_equal(model(TOKENS_1_T), plain).item()
        model.train()
        assert not mx.allclose(model(TOKENS_1_T), plain).item()


@pytest.mark.parametrize(
    ("config", "bits", "section", "reason"),
    [
        (MIXTURE, 0, {}, r"no DoRA layer for mlp\.switch_mlp\.down_proj \(SwitchLinear\); remove it"),
        (CONFIG, 3, {}, r"no DoRA layer for 3-bit weights \(mlp\.down_proj\); remove it"),
        (CONFIG, 6, {"target_modules": ("q_proj",)}, r"no DoRA layer for 6-bit weights \(self_attn\.q_proj\)"),
    ],
    ids=["experts", "3 bits", "6 bits"],
)
def test_what_mlx_lm_has_no_dora_for_is_refused(config: Any, bits: int, section: Any, reason: str) -> None:
    """With the way out; what can be trained still can."""
    model = build(config)
    if bits:
        model, _ = quantize_model(model, dict(config), group_size=32, bits=bits)
    with pytest.raises(ModelError, match=reason):
        install_adapter(model, adapter_settings(kind="dora", **section), seed=0)
    if not bits:
        install_adapter(model, adapter_settings(kind="dora", target_modules=("q_proj",)), seed=0)


def test_modules_of_several_ranks_share_one_scale() -> None:
    """The configuration keeps the largest rank, and each smaller one by its module's name."""
    model = build()
    section = adapter_settings(
        rank=4, ranks=("q_proj=6", "mlp.up_proj=2"), target_modules=("q_proj", "v_proj", "up_proj")
    )
    config, _ = install_adapter(model, section, seed=0)
    assert config.lora_parameters is not None
    assert config.lora_parameters.rank == 6
    assert config.ranks == {"mlp.up_proj": 2, "self_attn.v_proj": 4}
    block = model.layers[1]
    layers = (block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.up_proj)
    assert [layer.lora_b.shape[0] for layer in layers] == [6, 4, 2]
    assert {layer.scale for layer in layers} == {10.0}


def test_nothing_beside_packed_weights_but_adapters() -> None:
    """mlx-lm could not load what was trained; embeddings are packed themselves."""
    for key in ("train_embeddings", "train_head"):
        model, _ = quantize_model(build(UNTIED), dict(UNTIED), group_size=32, bits=4)
        with pytest.raises(ModelError, match=f"policy.method.{key}: quantized weights cannot"):
            install_adapter(model, adapter_settings("lora", **{key: True}), seed=0)


def ranks(**section: Any) -> dict[str, int]:
    """Ranks by module for the tiny dense model."""
    return module_ranks(build(CONFIG).layers, adapter_settings(**section))


def test_linear_modules_are_named_relative_to_their_block() -> None:
    """Routers and experts among them."""
    assert {"mlp.switch_mlp.down_proj", "mlp.gate"} <= linear_modules(build(MIXTURE).layers).keys()


def test_a_short_name_stands_for_the_modules_that_end_in_it() -> None:
    """PEFT's `q_proj` is mlx-lm's `self_attn.q_proj`; in `ranks` as in `target_modules`."""
    targets = ("q_proj", "mlp.up_proj")
    assert ranks(target_modules=targets) == {"mlp.up_proj": 8, "self_attn.q_proj": 8}
    assert ranks(target_modules=targets, ranks=("up_proj=3",)) == {"mlp.up_proj": 3, "self_attn.q_proj": 8}


@pytest.mark.parametrize("misspelt", ["self_atn.q_proj", "qproj"])
def test_an_unknown_name_names_the_nearest(misspelt: str) -> None:
    """A misspelt module is an error, never an adapter that trains less than asked."""
    with pytest.raises(ModelError, match=r"policy\.method\.target_modules: .*did you mean self_attn\.q_proj"):
        ranks(target_modules=(misspelt,))
    with pytest.raises(ModelError, match=r"policy\.method\.ranks: .*did you mean self_attn\.q_proj"):
        ranks(ranks=(f"{misspelt}=4",))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (("k_proj=33",), r"k_proj=33 exceeds the smaller side of self_attn\.k_proj, which is 32"),
        (
            ("q_proj=4", "self_attn.q_proj=6"),
            r"self_attn\.q_proj=6 sets the rank of self_attn\.q_proj twice, first to 4",
        ),
        (("up_proj=4",), r"up_proj=4 has no effect: policy\.method\.target_modules does not include up_proj"),
    ],
    ids=["too large", "twice", "left out"],
)
def test_a_rank_that_cannot_be_meant_is_refused(entries: tuple[str, ...], reason: str) -> None:
    """In one line that names policy.method.ranks."""
    with pytest.raises(ModelError, match=rf"^policy\.method\.ranks: {reason}$"):
        ranks(target_modules=("q_proj", "k_proj"), ranks=entries)


def test_the_largest_rank_is_the_smaller_side() -> None:
    """64 in, 32 out."""
    assert ranks(ranks=("k_proj=32",))["self_attn.k_proj"] == 32


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
