"""Models whose layers the CPU backend computes its own way."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3
from mlx_lm.tuner.lora import LoRALinear

from attachments.cpu.layers import ClosedFormLoRALinear, ClosedFormRMSNorm, install_cpu_layers, swiglu


class Two(nn.Module):
    """A low-rank layer after a norm."""

    def __init__(self, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        mx.random.seed(0)
        self.norm = nn.RMSNorm(6)
        self.norm.weight = mx.linspace(0.5, 2.0, 6)
        self.low_rank = LoRALinear.from_base(nn.Linear(6, 4, bias=bias), r=2, scale=3.0, dropout=dropout)
        self.low_rank.lora_b = mx.random.normal((2, 4))

    def __call__(self, x: mx.array) -> mx.array:
        result: mx.array = self.low_rank(self.norm(x))
        return result


def results(model: Two, x: mx.array) -> list[mx.array]:
    """Value, gradient of the input, and of what is trained."""

    def loss(x: mx.array, a: mx.array, b: mx.array, weight: mx.array) -> mx.array:
        model.low_rank.lora_a, model.low_rank.lora_b, model.norm.weight = a, b, weight
        return mx.sum(mx.sin(model(x)))

    given = [x, model.low_rank.lora_a, model.low_rank.lora_b, model.norm.weight]
    value, gradients = mx.value_and_grad(loss, argnums=[0, 1, 2, 3])(*given)
    model.low_rank.lora_a, model.low_rank.lora_b, model.norm.weight = given[1:]
    return [model(x), value, *gradients]


@pytest.mark.needs_cpu_path
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_low_rank_layers_keep_values_and_gradients(training: bool, bias: bool) -> None:
    """Those of mlx and mlx-lm up to rounding, whether the model trains or serves."""
    plain, suited = Two(bias=bias), Two(bias=bias)
    install_cpu_layers(suited)
    assert (type(suited.norm), type(suited.low_rank)) == (ClosedFormRMSNorm, ClosedFormLoRALinear)
    x = mx.random.normal((2, 3, 6), key=mx.random.key(3))
    plain.train(training)
    suited.train(training)
    for mine, other in zip(results(suited, x), results(plain, x), strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(other), rtol=2e-6, atol=2e-6)


def test_a_layer_with_dropout_stays_as_it_is() -> None:
    """Its masks are mlx-lm's affair."""
    model = Two(dropout=0.5)
    install_cpu_layers(model)
    assert type(model.low_rank) is LoRALinear


def test_a_layer_in_a_narrow_type_stays_as_it_is() -> None:
    """What is written here is for float32, in which the CPU backend computes."""
    model = Two()
    model.low_rank.linear.set_dtype(mx.bfloat16)
    install_cpu_layers(model)
    assert type(model.low_rank) is LoRALinear


@pytest.mark.needs_cpu_path
def test_gates_of_loaded_models_change_for_all_of_them() -> None:
    """Serving and training call one function, which is mlx-lm's by name."""
    install_cpu_layers(Two())
    assert vars(qwen3)["swiglu"] is swiglu


@pytest.mark.needs_cpu_path
def test_frozen_linear_weights_are_laid_out_by_inputs() -> None:
    """Those under an adapter too: the weights of an input lie side by side, and their values are the same."""
    model = nn.Sequential(nn.Linear(6, 4), Two().low_rank)
    frozen: list[nn.Linear] = [model.layers[0], model.layers[1].linear]
    for layer in frozen:
        layer.freeze()
    before = [np.array(layer.weight) for layer in frozen]
    install_cpu_layers(model)
    for layer, weight in zip(frozen, before, strict=True):
        assert np.array(layer.weight, copy=False).strides == (4, 4 * layer.weight.shape[0])
        np.testing.assert_array_equal(np.array(layer.weight), weight)


def test_linear_weights_that_are_trained_are_left_alone() -> None:
    """They are replaced at every update."""
    layer = nn.Linear(6, 4)
    weight = layer.weight
    install_cpu_layers(layer)
    assert layer.weight is weight
    assert np.array(weight, copy=False).strides == (4 * 6, 4)
