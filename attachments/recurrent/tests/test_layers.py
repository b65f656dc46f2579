"""Layers of mlx-lm's models compute in chunks what they compute token by token without the attachment."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta

from attachments.recurrent import layers
from clotho.models.attention import model_modules
from clotho.models.parameters import flat
from tests.small_models import tiny

TOKENS = 40


def logits_and_gradients(model: nn.Module) -> dict[str, mx.array]:
    """Return the logits of two rows, and the gradients of all parameters."""
    tokens = mx.random.randint(1, 64, (2, TOKENS), key=mx.random.key(0))

    def loss(model: nn.Module) -> tuple[mx.array, mx.array]:
        logits = model(tokens)
        return nn.losses.cross_entropy(logits, tokens, reduction="mean"), logits

    model.train()
    (_, logits), gradients = nn.value_and_grad(model, loss)(model)
    model.eval()
    return {"logits": logits, **flat(gradients)}


def with_function(function: Any) -> None:
    """Let all models of mlx-lm use a function for the gated delta rule."""
    for module in model_modules():
        if "gated_delta_update" in vars(module):
            vars(module)["gated_delta_update"] = function


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next", "kimi_linear"])
def test_models_compute_the_same_in_chunks(architecture: str) -> None:
    """Logits and the gradients of all parameters are equal within 1e-5 of the largest one."""
    model = tiny(architecture)
    try:
        with_function(layers.loop)
        expected = logits_and_gradients(model)
    finally:
        with_function(layers.gated_delta_update)
    found = logits_and_gradients(model)
    for name, array in expected.items():
        assert mx.max(mx.abs(found[name] - array)) <= 1e-5 * mx.maximum(1e-2, mx.max(mx.abs(array))), name


@pytest.mark.parametrize("options", [{"lower_bound": -5.0}, {"allow_neg_eigval": True}, {"mask": True}])
def test_options_of_the_function_of_mlx_lm(options: dict[str, Any]) -> None:
    """Bounded decays, eigenvalues below 0, and a mask: outputs at the tokens of the mask and the state are equal."""
    mx.random.seed(0)
    queries, keys, values, a = (mx.random.normal((2, TOKENS, 2, 4)) for _ in range(4))
    mask = mx.arange(TOKENS)[None] < mx.array([[30], [17]])
    options = options | ({"mask": mask} if "mask" in options else {})
    arrays = queries, 0.4 * keys, values, a, mx.random.normal((2, TOKENS, 2)), mx.zeros((2, 1)), mx.zeros((2, 4))
    (expected, last), (found, own_last) = layers.loop(*arrays, **options), layers.gated_delta_update(*arrays, **options)
    shown = mask if "mask" in options else mx.ones_like(mask)
    assert mx.allclose(mx.where(shown[..., None, None], found - expected, 0.0), mx.zeros_like(found), atol=1e-5)
    assert mx.allclose(own_last, last, atol=1e-5)


def test_a_decode_step_is_left_to_mlx_lm() -> None:
    """Outputs of one token are those of the loop bit for bit."""
    mx.random.seed(0)
    arrays = [*(mx.random.normal((2, 1, 2, 4)) for _ in range(3)), *(mx.random.normal((2, 1, 2)) for _ in range(2))]
    arrays += [mx.zeros((2,)), mx.zeros((2,))]
    assert mx.array_equal(layers.gated_delta_update(*arrays)[0], layers.loop(*arrays)[0])


def test_every_loaded_model_is_replaced() -> None:
    """Also the module that later models import the function from."""
    tiny("qwen3_5")
    layers.install()
    assert not [module for module in model_modules() if vars(module).get("gated_delta_update") is layers.loop]
    assert gated_delta.gated_delta_update is layers.gated_delta_update
