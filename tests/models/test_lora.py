"""Installation of adapters: target modules, ranks, trainable embeddings and heads, and refusals."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import quantize_model

from clotho.models.lora import (
    install_adapter,
    is_quantized,
    linear_modules,
    module_ranks,
    open_all_weights,
    token_weights,
    widths,
)
from clotho.models.parameters import flat, nested
from clotho.settings.model import Lora
from protocols.errors import ModelError
from tests import model_lanes
from tests.learner_settings import adapter_settings
from tests.saved_models import CONFIG, MIXTURE, TOKENS_1_T, UNTIED, build
from tests.small_models import ARCHITECTURES, tiny


def trainable(model: Any) -> dict[str, mx.array]:
    """Return the trainable parameters by name."""
    return flat(model.trainable_parameters())


def test_every_linear_layer_of_a_block_is_adapted_by_default() -> None:
    """Attention and feed-forward projections of all blocks, without embeddings and norms."""
    model = build()
    config, adapted = install_adapter(model, Lora(), seed=0)
    assert config.lora_parameters is not None
    assert config.lora_parameters.keys == (
        "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj",
        "self_attn.v_proj",
    )  # fmt: skip
    assert len(adapted) == 2 * 7
    assert len(trainable(model)) == 2 * 2 * 7


@pytest.mark.parametrize(("num_layers", "blocks"), [(-1, {"0", "1"}), (1, {"1"}), (2, {"0", "1"})])
def test_num_layers_counts_from_the_last_block(num_layers: int, blocks: set[str]) -> None:
    """As in mlx-lm. -1 means all blocks."""
    model = build()
    install_adapter(model, adapter_settings(num_layers=num_layers), seed=0)
    assert {name.split(".")[2] for name in trainable(model)} == blocks


@pytest.mark.parametrize("num_layers", [0, 3])
def test_an_invalid_number_of_blocks_is_refused(num_layers: int) -> None:
    """mlx-lm reads 0 as all blocks. 3 of 2 blocks is an error."""
    with pytest.raises(ModelError, match="has 2 blocks"):
        install_adapter(build(), adapter_settings(num_layers=num_layers), seed=0)


def test_scale_and_alpha_reach_the_layers() -> None:
    """mlx-lm's scale is absolute. alpha is divided by the rank, or by its square root for rsLoRA (arXiv:2312.03732)."""
    for section, scale in (
        (adapter_settings(scale=3.0), 3.0),
        (adapter_settings(alpha=32.0, rank=16), 2.0),
        (adapter_settings(alpha=32.0, rank=16, scaling="rank_stabilized"), 8.0),
    ):
        model = build()
        install_adapter(model, section, seed=0)
        assert model.layers[0].self_attn.q_proj.scale == scale


def test_a_quantized_base_accepts_only_adapters() -> None:
    """QLoRA: quantized weights have no gradient, so full training is refused. The message names an alternative."""
    model, _ = quantize_model(build(), dict(CONFIG), group_size=32, bits=4)
    assert is_quantized(model)
    with pytest.raises(ModelError, match=r"cannot be trained in full: use policy\.method = lora"):
        open_all_weights(model)
    install_adapter(model, Lora(), seed=0)
    assert trainable(model)["model.layers.0.self_attn.q_proj.lora_a"].shape == (64, 16)
    assert {name.rsplit(".", 1)[1] for name in trainable(model)} == {"lora_a", "lora_b"}


def test_full_training_trains_floating_point_parameters_only() -> None:
    """Integer parameters have no gradient and stay frozen."""
    model_lanes.skip_full_training("full")
    model = build()
    model.layers[0].mlp.table = mx.array([1, 2, 3])
    open_all_weights(model)
    assert "model.layers.0.mlp.table" not in trainable(model)
    assert len(trainable(model)) == len(flat(model.parameters())) - 1


@pytest.mark.needs_float32
def test_dora_trains_a_magnitude_per_output() -> None:
    """It starts as the norm of the weight's row (arXiv:2402.09353, section 4.3), so version 0 equals the base."""
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


def test_dora_computes_the_equation_of_the_paper() -> None:
    """Each row of W + scale (A B)^T is scaled to the length m. The layer's bias is added after."""
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
def test_every_kind_of_trainable_parameter_has_a_gradient(kind: Any) -> None:
    """Low-rank matrices, magnitudes, embeddings and head, at a point where B is not 0."""
    model_lanes.skip_quantized()
    model = build(UNTIED)
    install_adapter(model, adapter_settings(kind=kind, train_embeddings=True, train_head=True), seed=0)
    moved = {name: array + 0.05 for name, array in trainable(model).items()}
    model.update(nested(moved))
    gradients = nn.value_and_grad(model, lambda: (model(TOKENS_1_T) ** 2).mean())()[1]
    assert flat(gradients).keys() == moved.keys()
    assert all(mx.any(gradient != 0).item() for gradient in flat(gradients).values())


@pytest.mark.parametrize(
    ("config", "bits", "section", "reason"),
    [
        (MIXTURE, 0, {}, r"no DoRA layer for mlp\.switch_mlp\.down_proj \(SwitchLinear\); remove it"),
        (CONFIG, 3, {}, r"no DoRA layer for 3-bit weights \(mlp\.down_proj\); remove it"),
        (CONFIG, 6, {"target_modules": ("q_proj",)}, r"no DoRA layer for 6-bit weights \(self_attn\.q_proj\)"),
    ],
    ids=["experts", "3 bits", "6 bits"],
)
def test_layers_without_dora_in_mlx_lm_are_refused(config: Any, bits: int, section: Any, reason: str) -> None:
    """The message names an alternative, and the remaining layers are trainable."""
    model_lanes.skip_quantized()
    model = build(config)
    if bits:
        model, _ = quantize_model(model, dict(config), group_size=32, bits=bits)
    with pytest.raises(ModelError, match=reason):
        install_adapter(model, adapter_settings(kind="dora", **section), seed=0)
    if not bits:
        install_adapter(model, adapter_settings(kind="dora", target_modules=("q_proj",)), seed=0)


def test_modules_of_several_ranks_share_one_scale() -> None:
    """The configuration has the largest rank, and each smaller one by the name of its module."""
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
    assert {layer.scale for layer in layers} == {32 / 4}


def test_a_quantized_base_refuses_trainable_embeddings() -> None:
    """mlx-lm could not load the result, because the embeddings are quantized."""
    for key in ("train_embeddings", "train_head"):
        model, _ = quantize_model(build(UNTIED), dict(UNTIED), group_size=32, bits=4)
        with pytest.raises(ModelError, match=f"policy.method.{key}: quantized weights cannot"):
            install_adapter(model, adapter_settings("lora", **{key: True}), seed=0)


def ranks(**section: Any) -> dict[str, int]:
    """Return the ranks by module for the tiny dense model."""
    return module_ranks(build(CONFIG).layers, adapter_settings(**section))


def test_linear_modules_are_named_relative_to_their_block() -> None:
    """Routers and experts included."""
    assert {"mlp.switch_mlp.down_proj", "mlp.gate"} <= linear_modules(build(MIXTURE).layers).keys()


def test_a_short_name_selects_the_modules_that_end_in_it() -> None:
    """PEFT's `q_proj` is mlx-lm's `self_attn.q_proj`, in `ranks` and in `target_modules`."""
    targets = ("q_proj", "mlp.up_proj")
    assert ranks(target_modules=targets) == {"mlp.up_proj": 16, "self_attn.q_proj": 16}
    assert ranks(target_modules=targets, ranks=("up_proj=3",)) == {"mlp.up_proj": 3, "self_attn.q_proj": 16}


@pytest.mark.parametrize("misspelt", ["self_atn.q_proj", "qproj"])
def test_an_unknown_module_is_refused_with_the_nearest_name(misspelt: str) -> None:
    """An adapter never trains fewer modules than requested."""
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
def test_an_invalid_rank_is_refused(entries: tuple[str, ...], reason: str) -> None:
    """The message names policy.method.ranks."""
    with pytest.raises(ModelError, match=rf"^policy\.method\.ranks: {reason}$"):
        ranks(target_modules=("q_proj", "k_proj"), ranks=entries)


def test_the_largest_rank_is_the_smaller_side() -> None:
    """64 inputs and 32 outputs give 32."""
    assert ranks(ranks=("k_proj=32",))["self_attn.k_proj"] == 32


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_quantized_layer_is_as_wide_as_in_full_precision(bits: int) -> None:
    """Its codes are packed into words of 32 bits."""
    layer = nn.Linear(128, 96)
    assert widths(layer.to_quantized(group_size=64, bits=bits)) == widths(layer) == (128, 96)


GPT2: dict[str, Any] = {
    "n_ctx": 64, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 64, "layer_norm_epsilon": 1e-5,
    "vocab_size": 32,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_token_weights_finds_embeddings_and_head(architecture: str) -> None:
    """Doubling an embedding or the head changes the logits. No other matrix of that height remains."""
    model_lanes.skip_quantized()
    model = tiny(architecture, vocab_size=80)
    tokens_1_T = mx.array([[3, 5, 8]])
    before = model(tokens_1_T)
    found = token_weights(model, embeddings=True, head=False)
    assert len(found) == 1
    (embedding,) = found.values()
    assert type(embedding) is nn.Embedding
    embedding.weight = embedding.weight * mx.array([[2.0 if i % 2 else 0.5] for i in range(80)])
    assert not mx.allclose(model(tokens_1_T), before).item()
    tall = [name for name, module in model.named_modules() if getattr(module, "weight", before).shape[0] == 80]
    try:
        head = token_weights(model, embeddings=False, head=True)
    except ModelError:
        head = {}
    assert sorted([*found, *head]) == sorted(name for name in tall if name.count("layers") == 0)


def gpt2() -> Any:
    """Return a model with token and position embeddings and a tied head, without evaluated weights."""
    module = importlib.import_module("mlx_lm.models.gpt2")
    return module.Model(module.ModelArgs.from_dict({"model_type": "gpt2", **GPT2}))


def test_position_embeddings_are_not_token_embeddings() -> None:
    """GPT-2 has both and ties its head."""
    assert list(token_weights(gpt2(), embeddings=True, head=False)) == ["model.wte"]
    with pytest.raises(
        ModelError, match=r"policy\.method\.train_head: .*tied.*policy\.method\.train_embeddings = true trains both"
    ):
        token_weights(gpt2(), embeddings=True, head=True)


def test_token_weights_changes_and_computes_nothing() -> None:
    """The classes are those of mlx-lm again, and lazy weights stay unread."""
    model = gpt2()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    token_weights(model, embeddings=True, head=False)
    assert mx.get_peak_memory() < held + model.model.wte.weight.nbytes
    assert {type(model.model.wte), type(model.model.wpe)} == {nn.Embedding}


class TwoEnds(nn.Module):
    """A model with two layers behind its blocks whose outputs are as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: list[nn.Module] = []
        self.embed, self.mixer, self.head = nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def __call__(self, tokens_B_T: mx.array) -> mx.array:
        logits_B_T_V: mx.array = self.head(self.mixer(self.embed(tokens_B_T)))
        return logits_B_T_V


def test_the_head_is_the_last_layer_as_wide_as_the_vocabulary() -> None:
    """Another layer of this width is not trained."""
    assert set(token_weights(TwoEnds(), embeddings=True, head=True)) == {"embed", "head"}
