"""Installing what is trained: the right layers, and a clear refusal of anything else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import quantize_model

from actors.compute.adapters import install_adapter, is_quantized, linear_modules, open_all_weights
from actors.compute.trees import flat
from protocols.errors import ModelError
from protocols.profile import PolicySection
from tests.saved_models import CONFIG, MIXTURE, build


def trainable(model: Any) -> dict[str, mx.array]:
    """Trainable parameters by name."""
    return flat(model.trainable_parameters())


def test_every_linear_layer_of_a_block_is_adapted_by_default() -> None:
    """Attention and feed-forward projections of all blocks; no embedding, no norm."""
    model = build()
    config, adapted = install_adapter(model, PolicySection(), seed=0)
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
    install_adapter(model, PolicySection(rank=3), seed=0)
    assert trainable(model)["model.layers.0.mlp.switch_mlp.up_proj.lora_a"].shape == (4, 3, 64)


@pytest.mark.parametrize(("num_layers", "blocks"), [(-1, {"0", "1"}), (1, {"1"}), (2, {"0", "1"})])
def test_blocks_are_counted_from_the_last(num_layers: int, blocks: set[str]) -> None:
    """As mlx-lm counts; -1 is all of them."""
    model = build()
    install_adapter(model, PolicySection(num_layers=num_layers), seed=0)
    assert {name.split(".")[2] for name in trainable(model)} == blocks


@pytest.mark.parametrize("num_layers", [0, 3])
def test_an_impossible_number_of_blocks_is_refused(num_layers: int) -> None:
    """0 would mean all of them to mlx-lm, and 3 of 2 is a mistake."""
    with pytest.raises(ModelError, match="has 2 blocks"):
        install_adapter(build(), PolicySection(num_layers=num_layers), seed=0)


def test_a_short_name_stands_for_the_modules_that_end_in_it() -> None:
    """PEFT's `q_proj` is mlx-lm's `self_attn.q_proj`."""
    model = build()
    config, _ = install_adapter(model, PolicySection(target_modules=("q_proj", "mlp.up_proj")), seed=0)
    assert config.lora_parameters is not None
    assert config.lora_parameters.keys == ("mlp.up_proj", "self_attn.q_proj")


@pytest.mark.parametrize("misspelt", ["self_atn.q_proj", "qproj"])
def test_an_unknown_target_names_the_nearest(misspelt: str) -> None:
    """A misspelt module is an error, never an adapter that trains less than asked."""
    with pytest.raises(ModelError, match=r"did you mean self_attn\.q_proj"):
        install_adapter(build(), PolicySection(target_modules=(misspelt,)), seed=0)


def test_scale_and_alpha_reach_the_layers() -> None:
    """mlx-lm's scale is absolute; alpha is divided by the rank."""
    for section, scale in ((PolicySection(scale=3.0), 3.0), (PolicySection(alpha=32.0, rank=16), 2.0)):
        model = build()
        install_adapter(model, section, seed=0)
        assert model.layers[0].self_attn.q_proj.scale == scale


def test_a_quantised_base_takes_adapters_and_nothing_else() -> None:
    """QLoRA: packed weights have no gradient, so full training is refused with the way out."""
    model, _ = quantize_model(build(), dict(CONFIG), group_size=32, bits=4)
    assert is_quantized(model)
    with pytest.raises(ModelError, match=r"adapters only: use policy\.kind = lora"):
        open_all_weights(model)
    install_adapter(model, PolicySection(), seed=0)
    assert trainable(model)["model.layers.0.self_attn.q_proj.lora_a"].shape == (64, 8)
    assert {name.rsplit(".", 1)[1] for name in trainable(model)} == {"lora_a", "lora_b"}


def test_full_training_opens_floating_parameters_only() -> None:
    """A parameter of integers has no gradient and stays frozen."""
    model = build()
    model.layers[0].mlp.table = mx.array([1, 2, 3])
    open_all_weights(model)
    assert "model.layers.0.mlp.table" not in trainable(model)
    assert len(trainable(model)) == len(flat(model.parameters())) - 1


def test_linear_modules_are_named_relative_to_their_block() -> None:
    """Routers and experts among them."""
    assert "mlp.switch_mlp.down_proj" in linear_modules(build(MIXTURE).layers)
    assert "mlp.gate" in linear_modules(build(MIXTURE).layers)
