"""Several ranks in one file: padded with zeros, and cut back to the same bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from clotho.storage.adapters import padded, unpadded
from protocols.checkpoint import AdapterConfig, LoRAParameters
from protocols.errors import CheckpointError

CONFIG = AdapterConfig(
    fine_tune_type="lora",
    num_layers=-1,
    lora_parameters=LoRAParameters(rank=4, scale=1.0, dropout=0.0, keys=("mlp.up", "experts.mlp.up", "attn.q")),
    ranks={"mlp.up": 2, "experts.mlp.up": 3},
)


def arrays() -> dict[str, mx.array]:
    """A dense layer of rank 2, a stack of five experts of rank 3, a layer of the largest rank, an embedding."""
    shapes = {
        "model.layers.0.mlp.up.lora_a": (6, 2),
        "model.layers.0.mlp.up.lora_b": (2, 7),
        "model.layers.0.mlp.up.m": (7,),
        "model.layers.0.experts.mlp.up.lora_a": (5, 3, 6),
        "model.layers.0.experts.mlp.up.lora_b": (5, 7, 3),
        "model.layers.0.attn.q.lora_a": (6, 4),
        "model.embed.weight": (9, 6),
    }
    made = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in shapes.items()}
    mx.eval(made)
    return made


def test_the_rank_axis_grows_to_the_largest_rank_and_the_product_stays() -> None:
    """Names are matched by the longest key; all else is the very array."""
    given, wide = arrays(), padded(arrays(), CONFIG)
    assert {name.removeprefix("model.").removeprefix("layers.0."): array.shape for name, array in wide.items()} == {
        "mlp.up.lora_a": (6, 4),
        "mlp.up.lora_b": (4, 7),
        "mlp.up.m": (7,),
        "experts.mlp.up.lora_a": (5, 4, 6),
        "experts.mlp.up.lora_b": (5, 7, 4),
        "attn.q.lora_a": (6, 4),
        "embed.weight": (9, 6),
    }
    for layer in ("mlp.up", "experts.mlp.up"):
        a, b = f"model.layers.0.{layer}.lora_a", f"model.layers.0.{layer}.lora_b"
        if layer == "mlp.up":
            narrow_product, wide_product = given[a] @ given[b], wide[a] @ wide[b]
        else:
            narrow_product, wide_product = given[b] @ given[a], wide[b] @ wide[a]
        np.testing.assert_allclose(np.array(wide_product), np.array(narrow_product), rtol=1e-5, atol=1e-6)


def test_cutting_back_restores_every_bit() -> None:
    """And leaves alone what has another shape than padding gives, for the caller to complain about."""
    given = arrays()
    restored = unpadded(padded(given, CONFIG), CONFIG)
    assert all(mx.array_equal(restored[name], array).item() for name, array in given.items())
    assert unpadded(given, CONFIG)["model.layers.0.mlp.up.lora_a"].shape == (6, 2)


def test_what_is_cut_off_must_be_zero() -> None:
    """A larger rank under a smaller one's name would lose something."""
    wide = padded(arrays(), CONFIG)
    name = "model.layers.0.mlp.up.lora_b"
    wide[name] = wide[name] + 1e-8
    with pytest.raises(CheckpointError, match=rf"{name} is of a larger rank than 2"):
        unpadded(wide, CONFIG)


def test_one_rank_for_all_is_left_as_it_is() -> None:
    """No copy is made."""
    given = arrays()
    config = AdapterConfig(fine_tune_type="lora", num_layers=-1, lora_parameters=CONFIG.lora_parameters)
    assert all(padded(given, config)[name] is array for name, array in given.items())
