"""Layers of mlx-lm's models compute in chunks what they compute token by token without the attachment."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import gated_delta, ssm

from attachments.recurrent import layers
from attachments.recurrent.delta_rule import CHUNK
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


def with_functions(*functions: Any) -> None:
    """Let all models of mlx-lm use these functions."""
    for module in model_modules():
        for function in functions:
            if function.__name__ in vars(module):
                vars(module)[function.__name__] = function


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next", "kimi_linear", "mamba2", "falcon_h1"])
def test_models_compute_the_same_in_chunks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and the gradients of all parameters are equal within 1e-5 of the largest one, with two chunks and more."""
    monkeypatch.setattr(layers, "CHUNK", 16)
    model = tiny(architecture)
    try:
        with_functions(layers.loop, layers.whole)
        expected = logits_and_gradients(model)
    finally:
        with_functions(layers.gated_delta_update, layers.ssm_update)
    found = logits_and_gradients(model)
    for name, array in expected.items():
        assert mx.max(mx.abs(found[name] - array)) <= 1e-5 * mx.maximum(1e-2, mx.max(mx.abs(array))), name


def test_state_space_layers_stop_at_padding() -> None:
    """Lengths, a mask and a state in the chunks: outputs of real tokens and the last state are those of mlx-lm."""
    mx.random.seed(0)
    S = 2 * CHUNK + 9
    lengths = mx.array([S - 3, CHUNK - 2])
    shown = mx.arange(S) < lengths[:, None]
    x, B, C = mx.random.normal((2, S, 4, 3)), mx.random.normal((2, S, 2, 5)), mx.random.normal((2, S, 2, 5))
    arrays = x, mx.zeros(4), B, C, mx.ones(4), mx.random.normal((2, S, 4)), mx.zeros(4), mx.random.normal((2, 4, 3, 5))
    own, expected = (f(*arrays, mask=shown, lengths=lengths) for f in (layers.ssm_update, layers.whole))
    assert mx.allclose(mx.where(shown[..., None, None], own[0] - expected[0], 0.0), mx.zeros_like(x), atol=1e-5)
    assert mx.allclose(own[1], expected[1], atol=1e-5)


def test_a_mask_alone_stops_the_state_of_a_short_pass() -> None:
    """As lengths do: Nemotron-H passes no lengths."""
    mx.random.seed(0)
    x, B, C = mx.random.normal((1, 5, 4, 3)), mx.random.normal((1, 5, 2, 5)), mx.random.normal((1, 5, 2, 5))
    arrays = x, mx.zeros(4), B, C, mx.ones(4), mx.random.normal((1, 5, 4)), mx.zeros(4), mx.random.normal((1, 4, 3, 5))
    real = mx.arange(5)[None] < 3
    found, expected = (layers.ssm_update(*arrays, mask=real, lengths=lengths)[1] for lengths in (None, mx.array([3])))
    assert mx.allclose(found, expected, atol=1e-5)


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
    """Also the modules that later models import the functions from."""
    tiny("qwen3_5"), tiny("mamba2")
    layers.install()
    functions = [function for module in model_modules() for function in vars(module).values()]
    assert not {id(layers.loop), id(layers.whole)} & set(map(id, functions))
    assert (gated_delta.gated_delta_update, ssm.ssm_update) == (layers.gated_delta_update, layers.ssm_update)
