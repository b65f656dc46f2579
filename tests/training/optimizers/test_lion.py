"""Lion against float64, MLX's own, and by hand."""

from __future__ import annotations

from typing import Any

import mlx.optimizers as optim
import numpy as np
import pytest

from tests.training.optimizers.walks import assert_close, one_step, oracle, settings, walk, walk_of

LION = settings("lion", beta1=0.8, beta2=0.95, weight_decay=0.1)


def test_several_steps_equal_a_numpy_reference() -> None:
    """Algorithm 2 of arXiv:2302.06675 in float64."""
    m: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        direction = np.sign(0.8 * m.get(name, 0.0) + 0.2 * g)
        m[name] = 0.95 * m.get(name, 0.0) + 0.05 * g
        return theta - rate * (direction + 0.1 * theta)

    expected = oracle(move, 6)
    updated, state = walk(LION, 6)
    assert_close(updated, expected)
    assert_close(state.slots["average"], m)


def test_several_steps_equal_mlx() -> None:
    """The same rule, decay included."""
    assert_close(walk(LION, 4)[0], walk_of(optim.Lion(0.0, betas=[0.8, 0.95], weight_decay=0.1), 4))


def test_every_element_moves_by_the_rate() -> None:
    """By 0.1 against the gradient, however small that is; 1 decays to 0.99 first; no gradient, no step."""
    assert one_step("lion", [1.0, 1.0, 0.0], [1e-6, -5.0, 0.0], weight_decay=0.1) == pytest.approx([0.89, 1.09, 0.0])
