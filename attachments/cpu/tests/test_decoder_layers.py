"""Layers on the host compute what MLX's do, with the parameters that these have at the time."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from attachments.cpu.blas import Floats, matrix
from attachments.cpu.decoder_layers import (
    LowRankBuffers,
    ParameterVector,
    Projection,
    ProjectionGroup,
    RMSNorm,
    WeightMatrix,
    swiglu_in_place,
)
from attachments.cpu.layers import input_major

pytestmark = pytest.mark.needs_cpu_path

WIDTH, OUTPUTS, RANK = 6, 5, 2


def rows_of(width: int, seed: int = 0, rows: int = 4) -> Floats:
    """Random rows."""
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def linear(*, bias: bool, adapted: bool = False, laid_out_by_inputs: bool = False) -> Any:
    """A layer with random weights, and an adapter that changes what it computes."""
    mx.random.seed(0)
    layer = nn.Linear(WIDTH, OUTPUTS, bias=bias)
    if laid_out_by_inputs:
        layer.weight = input_major(layer.weight)
    whole: Any = layer
    if adapted:
        whole = LoRALinear.from_base(layer, r=RANK, scale=3.0)
        whole.lora_b = mx.random.normal((RANK, OUTPUTS))
    mx.eval(whole.parameters())
    return whole


def projected(projection: Projection, x: Floats, before: Floats | None = None) -> Floats:
    """What a projection writes, or adds to what is there."""
    out = np.full((len(x), OUTPUTS), np.nan, np.float32) if before is None else before.copy()
    low_rank = LowRankBuffers(len(x))
    low_rank[RANK].array[:] = np.nan
    ProjectionGroup(projection)(matrix(x), [matrix(out)], low_rank, add=before is not None)
    return out


@pytest.mark.parametrize("laid_out_by_inputs", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_is_the_layer_that_it_was_made_of(bias: bool, adapted: bool, laid_out_by_inputs: bool) -> None:
    """Bias and adapter included, written or added, whichever way its weights lie."""
    layer = linear(bias=bias, adapted=adapted, laid_out_by_inputs=laid_out_by_inputs)
    projection = Projection(layer, "layer")
    assert (projection.outputs, projection.rank) == (OUTPUTS, RANK if adapted else 0)
    x, before = rows_of(WIDTH), rows_of(OUTPUTS, seed=1)
    expected = np.array(layer(mx.array(x)))
    np.testing.assert_allclose(projected(projection, x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(projected(projection, x, before), before + expected, rtol=1e-5, atol=1e-5)


def test_a_projection_follows_every_parameter_of_its_layer() -> None:
    """Weights, bias and both halves of the adapter are swapped one after the other, while the buffers stay the same."""
    layer = linear(bias=True, adapted=True)
    projection, x = ProjectionGroup(Projection(layer, "layer")), rows_of(WIDTH)
    out, low_rank = np.empty((len(x), OUTPUTS), np.float32), LowRankBuffers(len(x))

    def computed() -> Floats:
        projection(matrix(x), [matrix(out)], low_rank)
        return out.copy()

    previous = computed()
    for module, key in ((layer.linear, "weight"), (layer.linear, "bias"), (layer, "lora_a"), (layer, "lora_b")):
        module[key] = module[key] * 1.5
        found = computed()
        np.testing.assert_allclose(found, np.array(layer(mx.array(x))), rtol=1e-5, atol=1e-5)
        assert np.abs(found - previous).max() > 1e-2
        previous = found


def test_weights_are_seen_where_they_lie_until_the_module_has_others() -> None:
    """Nothing is copied, and the same matrix is given as long as the array is the same."""
    layer = nn.Linear(WIDTH, OUTPUTS, bias=False)
    weights = WeightMatrix(layer, "weight", transposed=True)
    first = weights()
    assert weights() is first
    assert first.address == np.array(layer.weight, copy=False).__array_interface__["data"][0]
    layer.update({"weight": mx.arange(OUTPUTS * WIDTH, dtype=mx.float32).reshape(OUTPUTS, WIDTH)})
    np.testing.assert_array_equal(weights().array, np.array(layer.weight).T)
    as_it_is = WeightMatrix(layer, "weight", transposed=False)
    np.testing.assert_array_equal(as_it_is().array, np.array(layer.weight))


def test_vectors_of_several_modules_are_repeated_and_follow_each_of_them() -> None:
    """One row for every repeat, in the order of the modules."""
    one, other = nn.RMSNorm(3), nn.RMSNorm(3)
    vector = ParameterVector((one, "weight", 2), (other, "weight", 1))
    np.testing.assert_array_equal(vector(), np.ones((3, 3)))
    assert vector() is vector()
    other.weight = mx.array([4.0, 5.0, 6.0])
    np.testing.assert_array_equal(vector(), [[1, 1, 1], [1, 1, 1], [4, 5, 6]])
    one.weight = mx.array([7.0, 8.0, 9.0])
    np.testing.assert_array_equal(vector(), [[7, 8, 9], [7, 8, 9], [4, 5, 6]])


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_norm_is_mlxs(size: float) -> None:
    """Also where rows are so small that epsilon decides."""
    module = nn.RMSNorm(WIDTH, eps=1e-5)
    module.weight = mx.linspace(-1.0, 2.0, WIDTH)
    x = size * rows_of(WIDTH)
    out = np.full_like(x, np.nan)
    RMSNorm(module)(x, out)
    np.testing.assert_allclose(out, np.array(module(mx.array(x))), rtol=1e-5, atol=1e-6)


def test_the_gate_is_silu_times_up() -> None:
    """Where its exponential overflows or vanishes, too: there silu is 0, and the number itself."""
    x = np.array([[-1000.0, -90.0, -2.0, -0.0, 0.5, 3.0, 90.0, 1000.0]], np.float32)
    up = np.array([[2.0, -3.0, 0.5, 7.0, -1.5, 2.5, 4.0, -0.25]], np.float32)
    expected = np.array(nn.silu(mx.array(x))) * up
    found = x.copy()
    with np.errstate(over="ignore"):
        swiglu_in_place(found, up, np.full_like(x, np.nan))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-30)
    np.testing.assert_array_equal(found[0, [0, -1]], [0.0, -250.0])
