"""AdamW against float64, MLX's own, and by hand."""

from __future__ import annotations

from typing import Any

import mlx.optimizers as optim
import numpy as np
import pytest

from clotho.training.optimizers.adamw import seen
from tests.training.optimizers.walks import assert_close, one_step, oracle, settings, walk, walk_of

ADAMW = settings("adamw", beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)


def test_several_steps_equal_a_numpy_reference() -> None:
    """Algorithm 2 of arXiv:1711.05101 in float64, with bias correction and decay by the rate."""
    m: dict[str, Any] = {}
    v: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        m[name] = 0.8 * m.get(name, 0.0) + 0.2 * g
        v[name] = 0.95 * v.get(name, 0.0) + 0.05 * g**2
        m_hat, v_hat = m[name] / (1 - 0.8**t), v[name] / (1 - 0.95**t)
        return theta - rate * (m_hat / (np.sqrt(v_hat) + 1e-6) + 0.1 * theta)

    expected = oracle(move, 6)
    updated, state = walk(ADAMW, 6)
    assert_close(updated, expected)
    assert_close(state.slots["second"], v)
    assert state.step == 6


def test_several_steps_equal_mlx_with_bias_correction() -> None:
    """Which it leaves out by default."""
    theirs = optim.AdamW(0.0, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.1, bias_correction=True)
    assert_close(walk(ADAMW, 4)[0], walk_of(theirs, 4))


def test_the_first_step_has_the_size_of_the_rate() -> None:
    """m^ = g and v^ = g^2: 1 - 0.1 x 3 / (3 + 1) = 0.925, and -2 decays to -1.98 and gains 0.1 x 2 / (2 + 1)."""
    moved = one_step("adamw", [1.0], [3.0], epsilon=1.0)
    assert moved == pytest.approx([0.925])
    moved = one_step("adamw", [-2.0], [-2.0], epsilon=1.0, weight_decay=0.1)
    assert moved == pytest.approx([-1.98 + 0.2 / 3])


def test_without_memory_every_step_is_the_first() -> None:
    """beta = 0 is allowed: nothing to correct."""
    assert one_step("adamw", [1.0], [3.0], beta1=0.0, beta2=0.0) == pytest.approx([0.9])


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("t", [1, 2, 1000, 100_000])
def test_the_bias_correction_keeps_its_digits(beta: float, t: int) -> None:
    """1 - 0.99999^1 in float32 would have two of them; here it is a number of the host, rounded once."""
    expected = -np.expm1(t * np.log(np.float64(beta))) if beta else 1
    assert float(np.float32(seen(beta, t))) == pytest.approx(expected, rel=6e-8)
