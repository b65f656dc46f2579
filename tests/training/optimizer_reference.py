"""Small parameters with gradients, and the same optimizer steps by Clotho, by MLX and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from clotho.models.parameters import Arrays
from clotho.settings.learner import LearnerSection
from clotho.training.optimizers import OptimizerState, apply_step, initial_state
from tests.learner_settings import learner_settings

Doubles = dict[str, np.ndarray[Any, np.dtype[np.float64]]]
SHAPES = {"wide": (3, 5), "tall": (6, 2), "experts": (2, 4, 3), "vector": (4,)}
SCALE = 0.5
"""Factor of every gradient, as gradient clipping applies it."""


def settings(optimizer: str, **keys: Any) -> LearnerSection:
    """Settings that choose an optimizer."""
    return learner_settings(**{"optimizer": optimizer, **keys})


def rate(step: int) -> float:
    """Learning rate of a step (from 0), which changes as in a schedule."""
    return 0.01 / (1 + step)


def parameters(dtype: mx.Dtype = mx.float32) -> Arrays:
    """Parameters to train: two matrices, a stack of matrices and a vector."""
    rng = np.random.default_rng(7)
    return {name: mx.array(rng.normal(size=shape), dtype=mx.float32).astype(dtype) for name, shape in SHAPES.items()}


def gradients(step: int) -> Arrays:
    """Gradients of a step."""
    rng = np.random.default_rng(step)
    return {name: mx.array(rng.normal(size=shape), dtype=mx.float32) for name, shape in SHAPES.items()}


def doubles(arrays: Arrays) -> Doubles:
    """The arrays in float64."""
    return {name: np.array(array.astype(mx.float32), dtype=np.float64) for name, array in arrays.items()}


def take_steps(
    chosen: LearnerSection,
    steps: int,
    *,
    start: Arrays | None = None,
    state: OptimizerState | None = None,
    first: int = 0,
) -> tuple[Arrays, OptimizerState]:
    """Take steps `first`, `first + 1` ... from `start` and `state`; by default from the initial parameters."""
    at = parameters() if start is None else start
    state = state or initial_state(at, chosen)
    for step in range(first, first + steps):
        at, state = apply_step(at, gradients(step), state, learning_rate=rate(step), scale=SCALE, settings=chosen)
    return at, state


def take_mlx_steps(optimizer: optim.Optimizer, steps: int, names: tuple[str, ...] = tuple(SHAPES)) -> Arrays:
    """Take the same steps with an optimizer of `mlx.optimizers` alone, for some of the parameters."""
    at = {name: parameters()[name] for name in names}
    for step in range(steps):
        optimizer.learning_rate = rate(step)
        at = optimizer.apply_gradients({name: SCALE * gradients(step)[name] for name in names}, at)
    return at


def take_float64_steps(move: Callable[[str, Any, Any, int, float], Any], steps: int) -> Doubles:
    """Take the same steps in float64: `move(name, theta, g, t, rate)` returns the new theta and keeps its own state."""
    at = doubles(parameters())
    for step in range(steps):
        for name, g in doubles(gradients(step)).items():
            at[name] = move(name, at[name], SCALE * g, step + 1, rate(step))
    return at


def assert_close(actual: Arrays, expected: Arrays | Doubles, *, rtol: float = 1e-5) -> None:
    """Assert that every array of `expected` equals the actual one within rounding."""
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(actual[name]), np.array(value), rtol=rtol, atol=1e-7, err_msg=name)


def first_step(optimizer: str, theta: Any, gradient: Any, *, name: str = "a", **keys: Any) -> Any:
    """Return one array after its first step at learning rate 0.1, as plain numbers."""
    chosen, start = settings(optimizer, **keys), {name: mx.array(theta, dtype=mx.float32)}
    gradients = {name: mx.array(gradient, dtype=mx.float32)}
    state = initial_state(start, chosen)
    updated, _ = apply_step(start, gradients, state, learning_rate=0.1, scale=1.0, settings=chosen)
    return np.array(updated[name]).tolist()
