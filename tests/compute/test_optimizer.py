"""AdamW as a function."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from actors.compute.optimizer import (
    AdamState,
    adamw,
    clip_scale,
    global_norm,
    initial_state,
    state_arrays,
    state_from_arrays,
)
from protocols.profile import LearnerSection

SETTINGS = LearnerSection(beta1=0.9, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
Arrays = dict[str, mx.array]


def parameters(dtype: mx.Dtype = mx.float32) -> Arrays:
    """Two arrays to train."""
    return {"a": mx.array([[1.0, -2.0], [0.5, 3.0]]).astype(dtype), "b": mx.array([0.25, -0.75, 1.5]).astype(dtype)}


def gradients(step: int) -> Arrays:
    """Gradients of a step, a function of its number."""
    rng = np.random.default_rng(step)
    return {
        "a": mx.array(rng.normal(size=(2, 2)), dtype=mx.float32),
        "b": mx.array(rng.normal(size=3), dtype=mx.float32),
    }


def run(
    steps: int, start: Arrays, state: AdamState, settings: LearnerSection = SETTINGS, first: int = 0
) -> tuple[Arrays, AdamState]:
    """Take steps `first`, `first + 1` ..."""
    for step in range(first, first + steps):
        start, state = adamw(start, gradients(step), state, learning_rate=0.01, scale=0.5, s=settings)
    return start, state


def test_several_steps_equal_a_numpy_reference() -> None:
    """Algorithm 2 of arXiv:1711.05101 in float64, with bias correction, decay by the rate, and scaled gradients."""
    theta = {name: np.array(value, dtype=np.float64) for name, value in parameters().items()}
    m = {name: np.zeros_like(value) for name, value in theta.items()}
    v = {name: np.zeros_like(value) for name, value in theta.items()}
    for step in range(6):
        for name, value in gradients(step).items():
            g = 0.5 * np.array(value, dtype=np.float64)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            m_hat, v_hat = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.95 ** (step + 1))
            theta[name] = theta[name] - 0.01 * (m_hat / (np.sqrt(v_hat) + 1e-6) + 0.1 * theta[name])
    updated, state = run(6, parameters(), initial_state(parameters()))
    for name in theta:
        np.testing.assert_allclose(np.array(updated[name]), theta[name], rtol=1e-5)
        np.testing.assert_allclose(np.array(state.second[name]), v[name], rtol=1e-5)
    assert state.step == 6


def test_the_first_step_has_the_size_of_the_rate() -> None:
    """With bias correction m^ / sqrt v^ = sign g: without it the step would be (1-b1)/sqrt(1-b2) = 0.45 times that."""
    settings = replace(SETTINGS, weight_decay=0.0)
    updated, _ = run(1, parameters(), initial_state(parameters()), settings)
    moved = np.array(parameters()["b"] - updated["b"])
    np.testing.assert_allclose(moved, 0.01 * np.sign(np.array(gradients(0)["b"])), rtol=1e-3)


def test_nothing_that_was_given_is_changed() -> None:
    """Parameters and state before a step are as they were, bit for bit: another may still serve them."""
    start = parameters()
    state = initial_state(start)
    before = [np.array(value).tobytes() for value in (*start.values(), *state.first.values(), *state.second.values())]
    mx.eval(run(2, start, state))
    after = [np.array(value).tobytes() for value in (*start.values(), *state.first.values(), *state.second.values())]
    assert before == after
    assert state.step == 0


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_restored_state_continues_bit_for_bit(dtype: mx.Dtype) -> None:
    """Three steps, through names and arrays, and three more: the same as six."""
    whole, whole_state = run(6, parameters(dtype), initial_state(parameters(dtype)))
    half, half_state = run(3, parameters(dtype), initial_state(parameters(dtype)))
    restored = state_from_arrays(state_arrays(half_state), half)
    rest, rest_state = run(3, half, restored, first=3)
    for one, other in ((whole, rest), (state_arrays(whole_state), state_arrays(rest_state))):
        assert {n: np.array(v.astype(mx.float32)).tobytes() for n, v in one.items()} == {
            n: np.array(v.astype(mx.float32)).tobytes() for n, v in other.items()
        }


def test_small_updates_of_narrow_parameters_add_up() -> None:
    """Thirty steps of 1e-4 move a bfloat16 weight of 1, although each alone is below its spacing of 1/128."""
    start = {"a": mx.ones(1, dtype=mx.bfloat16)}
    state = initial_state(start)
    settings = replace(SETTINGS, weight_decay=0.0)
    for _ in range(80):
        start, state = adamw(start, {"a": mx.ones(1)}, state, learning_rate=1e-4, scale=1.0, s=settings)
    assert start["a"].dtype == mx.bfloat16
    assert state.master["a"].item() == pytest.approx(1.0 - 80e-4, rel=1e-4)
    assert start["a"].item() == pytest.approx(0.992, abs=1e-3)


def test_a_state_of_other_parameters_is_refused() -> None:
    """By name, by shape and by type."""
    arrays = state_arrays(initial_state(parameters()))
    wrong_shape = arrays | {"first.a": mx.zeros((2, 3))}
    missing = {name: value for name, value in arrays.items() if name != "second.b"}
    wrong_type = arrays | {"first.a": mx.zeros((2, 2), dtype=mx.bfloat16)}
    for state, culprit in ((wrong_shape, "first.a"), (missing, "second.b"), (wrong_type, "first.a")):
        with pytest.raises(ValueError, match=culprit):
            state_from_arrays(state, parameters())


def test_the_norm_is_that_of_all_gradients_as_one_vector() -> None:
    """3, 4 and 12: norm 13."""
    assert global_norm({"a": mx.array([3.0, 4.0]), "b": mx.array([[12.0]])}).item() == pytest.approx(13.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_norm_not_finite(bad: float) -> None:
    """It is what the guard looks at."""
    norm = global_norm({"a": mx.array([1.0, bad]), "b": mx.array([2.0])})
    assert not mx.isfinite(norm).item()


def test_clipping_only_ever_shortens() -> None:
    """Norm 5 to 2: 0.4; norm 1 stays; a maximum of 0 turns clipping off; a zero gradient is no division by zero."""
    assert [clip_scale(5.0, 2.0), clip_scale(1.0, 2.0), clip_scale(5.0, 0.0), clip_scale(0.0, 2.0)] == [
        0.4,
        1.0,
        1.0,
        1.0,
    ]
