"""A few arrays and their gradients, and optimizers that walk along them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from msgspec import convert

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.state import OptimizerState, initial_state, step

Arrays = dict[str, mx.array]
Doubles = dict[str, np.ndarray[Any, np.dtype[np.float64]]]
SHAPES = {"wide": (3, 5), "tall": (6, 2), "experts": (2, 4, 3), "vector": (4,)}
SCALE = 0.5
"""What every gradient is multiplied by, as clipping does."""


def settings(kind: str, **keys: Any) -> LearnerSection:
    """Settings of an optimizer."""
    return convert({"optimizer": kind, **keys}, LearnerSection)


def rate(number: int) -> float:
    """Learning rate of step `number` (from 0): a schedule moves it."""
    return 0.01 / (1 + number)


def parameters(dtype: mx.Dtype = mx.float32) -> Arrays:
    """Arrays to train."""
    rng = np.random.default_rng(7)
    return {name: mx.array(rng.normal(size=shape), dtype=mx.float32).astype(dtype) for name, shape in SHAPES.items()}


def gradients(number: int) -> Arrays:
    """Gradients of step `number`."""
    rng = np.random.default_rng(number)
    return {name: mx.array(rng.normal(size=shape), dtype=mx.float32) for name, shape in SHAPES.items()}


def doubles(arrays: Arrays) -> Doubles:
    """The same in float64."""
    return {name: np.array(array.astype(mx.float32), dtype=np.float64) for name, array in arrays.items()}


def walk(
    how: LearnerSection, steps: int, *, start: Arrays | None = None, state: OptimizerState | None = None, first: int = 0
) -> tuple[Arrays, OptimizerState]:
    """Take steps `first`, `first + 1` ... from the parameters above, or from where another walk ended."""
    at = parameters() if start is None else start
    state = state or initial_state(how.optimizer, at)
    for number in range(first, first + steps):
        at, state = step(at, gradients(number), state, learning_rate=rate(number), scale=SCALE, settings=how)
    return at, state


def walk_of(theirs: optim.Optimizer, steps: int, names: tuple[str, ...] = tuple(SHAPES)) -> Arrays:
    """The same steps of an optimizer of `mlx.optimizers`, for some of the arrays."""
    at = {name: parameters()[name] for name in names}
    for number in range(steps):
        theirs.learning_rate = rate(number)
        at = theirs.apply_gradients({name: SCALE * gradients(number)[name] for name in names}, at)
    return at


def oracle(move: Callable[[str, Any, Any, int, float], Any], steps: int) -> Doubles:
    """The same steps in float64: `move(name, theta, g, t, rate)` returns the new theta, and keeps its own state."""
    at = doubles(parameters())
    for number in range(steps):
        for name, g in doubles(gradients(number)).items():
            at[name] = move(name, at[name], SCALE * g, number + 1, rate(number))
    return at


def assert_close(ours: Arrays, expected: Arrays | Doubles, *, rtol: float = 1e-5) -> None:
    """Every array of `expected`, within rounding."""
    for name, value in expected.items():
        np.testing.assert_allclose(np.array(ours[name]), np.array(value), rtol=rtol, atol=1e-7, err_msg=name)


def one_step(kind: str, theta: Any, gradient: Any, *, name: str = "a", **keys: Any) -> Any:
    """The first step of one array at rate 0.1, as plain numbers."""
    start = {name: mx.array(theta, dtype=mx.float32)}
    updated, _ = step(
        start,
        {name: mx.array(gradient, dtype=mx.float32)},
        initial_state(kind, start),
        learning_rate=0.1,
        scale=1.0,
        settings=settings(kind, **keys),
    )
    return np.array(updated[name]).tolist()
