"""Optimizer steps: masters, decay, LoRA+ rates and state, and every rule against float64 and `mlx.optimizers`."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from clotho.models.parameters import Arrays
from clotho.training.optimizers import (
    OptimizerState,
    apply_step,
    clip_scale,
    global_norm,
    initial_state,
    rule_name,
    rule_settings,
    state_arrays,
    state_bytes,
    state_from_arrays,
)
from tests.training.optimizer_reference import (
    SHAPES,
    assert_close,
    first_step,
    parameters,
    settings,
    take_float64_steps,
    take_mlx_steps,
    take_steps,
)

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon", "sgd")
ADAMW = settings("adamw", beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
MUON = settings("muon", momentum=0.7, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-6)


def bits(parameters: Arrays, state: OptimizerState) -> dict[str, bytes]:
    """Return the bits of every array."""
    everything = {**{f"parameter.{name}": array for name, array in parameters.items()}, **state_arrays(state)}
    return {name: np.array(array.astype(mx.float32)).tobytes() for name, array in everything.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_changes_no_array_that_it_was_given(optimizer: str) -> None:
    """Parameters and state before a step keep their bits, because other threads may still read them."""
    start = parameters()
    state = initial_state(start, settings(optimizer))
    before = bits(start, state)
    after, later = take_steps(settings(optimizer, weight_decay=0.1), 2, start=start, state=state)
    mx.eval(after, later.slots)
    assert bits(start, state) == before
    assert (state.step, later.step) == (0, 2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_state_continues_bit_for_bit(optimizer: str, dtype: mx.Dtype) -> None:
    """Three steps, a round trip through named arrays, and three more steps equal six steps."""
    chosen = settings(optimizer, weight_decay=0.1)
    whole = take_steps(chosen, 6, start=parameters(dtype))
    half, state = take_steps(chosen, 3, start=parameters(dtype))
    restored = state_from_arrays(state_arrays(state), half, chosen)
    assert bits(*take_steps(chosen, 3, start=half, state=restored, first=3)) == bits(*whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_parameters_are_the_master_rounded(optimizer: str, dtype: mx.Dtype) -> None:
    """The step updates the float32 master as it would update a float32 parameter with the same start."""
    chosen = settings(optimizer, weight_decay=0.1)
    narrow, state = take_steps(chosen, 3, start=parameters(dtype))
    wide, _ = take_steps(chosen, 3, start={name: array.astype(mx.float32) for name, array in parameters(dtype).items()})
    for name, array in narrow.items():
        assert array.dtype == dtype
        assert mx.array_equal(state.master[name], wide[name])
        assert mx.array_equal(array, wide[name].astype(dtype))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_zero_gradient_leaves_only_the_decay(optimizer: str) -> None:
    """From the initial state a zero gradient divides nothing by zero: theta times 1 - 0.01 x 0.1."""
    start = parameters()
    zeros = {name: mx.zeros(array.shape) for name, array in start.items()}
    for decay, factor in ((0.0, 1.0), (0.1, 0.999)):
        chosen = settings(optimizer, weight_decay=decay)
        after, _ = apply_step(
            start, zeros, initial_state(start, chosen), learning_rate=0.01, scale=1.0, settings=chosen
        )
        for name, array in after.items():
            np.testing.assert_allclose(np.array(array), factor * np.array(start[name]), rtol=1e-6 if decay else 0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lora_b_uses_its_own_multiple_of_the_learning_rate(optimizer: str) -> None:
    """With lora_plus = 4, B moves as at four times the rate, decay included; A moves as without."""
    start = {"q_proj.lora_a": parameters()["tall"], "q_proj.lora_b": parameters()["wide"]}
    gradients = {name: mx.sin(3 * array) for name, array in start.items()}

    def moved(rate: float, lora_plus: float) -> Arrays:
        chosen = settings(optimizer, weight_decay=0.1, lora_plus=lora_plus)
        state = initial_state(start, chosen)
        return apply_step(start, gradients, state, learning_rate=rate, scale=1.0, settings=chosen)[0]

    plus, slow, fast = moved(0.01, 4.0), moved(0.01, 1.0), moved(0.04, 1.0)
    assert mx.array_equal(plus["q_proj.lora_a"], slow["q_proj.lora_a"])
    assert mx.allclose(plus["q_proj.lora_b"], fast["q_proj.lora_b"], rtol=1e-6, atol=0)
    assert not mx.allclose(plus["q_proj.lora_b"], slow["q_proj.lora_b"], rtol=1e-3, atol=0)


def test_a_state_of_other_parameters_or_another_optimizer_is_refused() -> None:
    """Names, shapes and types of the arrays must all fit."""
    adamw = settings("adamw")
    arrays = state_arrays(initial_state(parameters(), adamw))
    wrong_shape = arrays | {"adamw.m.vector": mx.zeros((2, 3))}
    missing = {name: value for name, value in arrays.items() if name != "adamw.v.wide"}
    wrong_type = arrays | {"adamw.m.vector": mx.zeros((4,), dtype=mx.bfloat16)}
    for state, name in ((wrong_shape, "adamw.m.vector"), (missing, "adamw.v.wide"), (wrong_type, "adamw.m.vector")):
        with pytest.raises(ValueError, match=name):
            state_from_arrays(state, parameters(), adamw)
    for optimizer in OPTIMIZERS:
        for other in {*OPTIMIZERS} - {optimizer}:
            with pytest.raises(ValueError, match=other):
                state_from_arrays(
                    state_arrays(initial_state(parameters(), settings(optimizer))), parameters(), settings(other)
                )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bytes_of_a_state_are_known_in_advance(optimizer: str, dtype: mx.Dtype) -> None:
    """They are those of the arrays after a step."""
    _, state = take_steps(settings(optimizer), 1, start=parameters(dtype))
    expected = sum(len(value) for value in bits({}, state).values())
    assert state_bytes(parameters(dtype), settings(optimizer)) == expected


def test_adamw_equals_a_float64_reference() -> None:
    """Algorithm 2 of arXiv:1711.05101 with bias correction and decay by the rate."""
    m: dict[str, Any] = {}
    v: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        m[name] = 0.8 * m.get(name, 0.0) + 0.2 * g
        v[name] = 0.95 * v.get(name, 0.0) + 0.05 * g**2
        m_hat, v_hat = m[name] / (1 - 0.8**t), v[name] / (1 - 0.95**t)
        return theta - rate * (m_hat / (np.sqrt(v_hat) + 1e-6) + 0.1 * theta)

    updated, state = take_steps(ADAMW, 6)
    assert_close(updated, take_float64_steps(move, 6))
    assert_close(state.slots["adamw.v"], v)


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999])
def test_the_bias_correction_is_computed_in_float64(beta: float) -> None:
    """In float32, 1 - 0.99999 would have two digits: the first step would not be 0.1 to within 1e-6."""
    assert first_step("adamw", [0.0], [3.0], beta2=beta, epsilon=1e-30) == pytest.approx([-0.1], rel=3e-7)


def test_lion_equals_a_float64_reference_and_mlx() -> None:
    """Algorithm 2 of arXiv:2302.06675, with the same decoupled decay as MLX."""
    lion, m = settings("lion", beta1=0.8, beta2=0.95, weight_decay=0.1), dict[str, Any]()

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        direction = np.sign(0.8 * m.get(name, 0.0) + 0.2 * g)
        m[name] = 0.95 * m.get(name, 0.0) + 0.05 * g
        return theta - rate * (direction + 0.1 * theta)

    updated, state = take_steps(lion, 6)
    assert_close(updated, take_float64_steps(move, 6))
    assert_close(state.slots["lion.m"], m)
    assert_close(take_steps(lion, 4)[0], take_mlx_steps(optim.Lion(0.0, betas=[0.8, 0.95], weight_decay=0.1), 4))


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_equals_a_float64_reference(momentum: float) -> None:
    """The velocity is a decaying sum, not an average, and the decay is decoupled (MLX's own is L2)."""
    v: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        v[name] = momentum * v.get(name, 0.0) + g
        return theta - rate * (v[name] + 0.1 * theta)

    chosen = settings("sgd", momentum=momentum, weight_decay=0.1)
    assert_close(take_steps(chosen, 6)[0], take_float64_steps(move, 6))
    assert first_step("sgd", [1.0], [3.0]) == pytest.approx([0.7])


def test_adafactor_equals_a_float64_reference() -> None:
    """Algorithms 4 and 5 of arXiv:1804.04235, with sums over rows and columns as printed, each expert by itself."""
    rows: dict[str, Any] = {}
    columns: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        beta = 1 - t**-0.8
        s = g**2 + 1e-30
        if g.ndim == 1:
            rows[name] = second = beta * rows.get(name, 0.0) + (1 - beta) * s
        else:
            rows[name] = beta * rows.get(name, 0.0) + (1 - beta) * s.sum(axis=-1)
            columns[name] = beta * columns.get(name, 0.0) + (1 - beta) * s.sum(axis=-2)
            outer = rows[name][..., :, None] * columns[name][..., None, :]
            second = outer / rows[name].sum(axis=-1)[..., None, None]
        u = g / np.sqrt(second)
        axes = tuple(range(u.ndim))[-2:]
        u = u / np.maximum(1.0, np.sqrt((u**2).mean(axis=axes, keepdims=True)))
        return theta - rate * (u + 0.1 * theta)

    assert_close(take_steps(settings("adafactor", weight_decay=0.1), 6)[0], take_float64_steps(move, 6))


def test_adafactor_stays_finite_beside_a_very_large_gradient() -> None:
    """MLX's own factors give inf * 0 = NaN for rows and columns without a gradient."""
    moved = np.array(first_step("adafactor", [[1.0, 1.0], [1.0, 1.0]], [[1e12, 0.0], [0.0, 0.0]]))
    assert moved[0, 0] < 1.0
    np.testing.assert_array_equal(moved.ravel()[1:], [1.0, 1.0, 1.0])


def polynomial(matrix: Any) -> Any:
    """Apply five Newton-Schulz iterations to the singular values of matrix / norm."""
    u, s, v = np.linalg.svd(matrix / (np.linalg.norm(matrix) + 1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def test_muon_equals_a_float64_reference() -> None:
    """Averaged Nesterov momentum, orthogonalized per matrix, scaled by 0.2 sqrt(max(rows, columns))."""
    momentum: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        momentum[name] = 0.7 * momentum.get(name, 0.0) + 0.3 * g
        direction = 0.3 * g + 0.7 * momentum[name]
        stack = direction.reshape(-1, *direction.shape[-2:])
        update = np.stack([polynomial(matrix) for matrix in stack]).reshape(direction.shape)
        return theta - rate * (0.2 * math.sqrt(max(theta.shape[-2:])) * update + 0.1 * theta)

    matrices = [name for name, shape in SHAPES.items() if len(shape) > 1]
    expected = take_float64_steps(lambda name, *given: move(name, *given) if name in matrices else given[0], 6)
    updated, state = take_steps(MUON, 6)
    assert_close(updated, {name: expected[name] for name in matrices}, rtol=3e-5)
    assert_close(state.slots["muon.v"], momentum)


def test_muon_updates_a_vector_as_adamw_does() -> None:
    """It uses the betas, the epsilon and the decay of the same settings."""
    assert_close(take_steps(MUON, 4)[0], {"vector": take_steps(ADAMW, 4)[0]["vector"]}, rtol=0)


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("layers.0.self_attn.q_proj.lora_a", (64, 8), "muon"),
        ("layers.0.mlp.switch_mlp.up_proj.weight", (4, 64, 32), "muon"),
        ("layers.0.norm.weight", (64,), "adamw"),
        ("layers.0.conv1d.weight", (64, 4, 1), "adamw"),
        ("layers.0.mlp.switch_mlp.up_proj.bias", (4, 64), "adamw"),
        ("model.embed_tokens.weight", (256, 64), "adamw"),
        ("transformer.wte.weight", (256, 64), "adamw"),
        ("lm_head.weight", (256, 64), "adamw"),
    ],
)
def test_muon_handles_hidden_matrices_alone(name: str, shape: tuple[int, ...], rule: str) -> None:
    """The shape and the names of embeddings and head decide."""
    assert rule_name(rule_settings(name, mx.zeros(shape), MUON.optimizer)) == rule


def test_the_global_norm_is_that_of_one_vector() -> None:
    """3, 4 and 12: norm 13. One element that is not finite makes the norm not finite."""
    assert global_norm({"a": mx.array([3.0, 4.0]), "b": mx.array([[12.0]])}).item() == pytest.approx(13.0)
    for bad in (math.nan, math.inf, -math.inf):
        assert not mx.isfinite(global_norm({"a": mx.array([1.0, bad]), "b": mx.array([2.0])})).item()


@pytest.mark.parametrize(
    ("norm", "max_norm", "scale"), [(5.0, 2.0, 0.4), (1.0, 2.0, 1.0), (5.0, 0.0, 1.0), (0.0, 2.0, 1.0)]
)
def test_clipping_only_shortens_a_gradient(norm: float, max_norm: float, scale: float) -> None:
    """Norm 5 to 2: 0.4; norm 1 stays; a maximum of 0 turns clipping off; a zero gradient is not divided by zero."""
    assert clip_scale(norm, max_norm) == scale


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(value: float) -> None:
    """The message names the array."""
    adamw = settings("adamw")
    state = state_arrays(initial_state(parameters(), adamw))
    name = next(name for name, array in state.items() if array.ndim)
    state[name] = mx.full(state[name].shape, value, dtype=state[name].dtype)
    with pytest.raises(ValueError, match=name):
        state_from_arrays(state, parameters(), adamw)
