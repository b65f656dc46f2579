"""Adafactor against float64, MLX's own, and by hand."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from clotho.training.optimizers.adafactor import slots
from tests.training.optimizers.walks import assert_close, one_step, oracle, settings, walk, walk_of

ADAFACTOR = settings("adafactor", weight_decay=0.1)


def test_several_steps_equal_a_numpy_reference() -> None:
    """Algorithms 4 and 5 of arXiv:1804.04235 in float64, sums over rows and columns as printed there."""
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

    expected = oracle(move, 6)
    assert_close(walk(ADAFACTOR, 6)[0], expected)


def test_several_steps_equal_mlx_for_vectors_and_matrices() -> None:
    """Relative steps and parameter scaling off. Of stacked matrices it clips all by one root mean square; we, each."""
    theirs = optim.Adafactor(0.01, weight_decay=0.0, scale_parameter=False, relative_step=False)
    ours, _ = walk(settings("adafactor"), 4)
    assert_close(ours, walk_of(theirs, 4, names=("wide", "tall", "vector")))


def test_a_gradient_of_rank_one_is_divided_by_its_own_size() -> None:
    """The factored second moment of u v^T is exact: the first step moves every element by the rate, 0.1."""
    moved = one_step("adafactor", [[0.0] * 3] * 2, [[1.0, -2.0, 4.0], [3.0, -6.0, 12.0]])
    np.testing.assert_allclose(moved, [[-0.1, 0.1, -0.1]] * 2, rtol=1e-5)


def test_an_update_beyond_the_threshold_is_clipped() -> None:
    """g = diag(1, 0.1): means R = C = (0.5, 0.005), mean R = 0.2525, so V = diag(0.25, 2.5e-5) / 0.2525 where g is not
    zero, and g / sqrt V = diag(1, 10) sqrt 1.01: its root mean square is 5.05. The step is 0.1 times that over 5.05.
    """
    moved = np.array(one_step("adafactor", [[0.0, 0.0], [0.0, 0.0]], [[1.0, 0.0], [0.0, 0.1]]))
    np.testing.assert_allclose(moved, -0.1 * np.diag([1.0, 10.0]) * math.sqrt(1.01) / 5.05, rtol=1e-5)


def test_rows_and_columns_without_gradient_stay() -> None:
    """The smallest second moment beside the largest: nothing overflows, nothing moves."""
    moved = np.array(one_step("adafactor", [[1.0, 1.0], [1.0, 1.0]], [[1e9, 0.0], [0.0, 0.0]]))
    assert moved[0, 0] < 1.0
    np.testing.assert_array_equal(moved.ravel()[1:], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(("shape", "numbers"), [((512, 8), 520), ((4, 512, 8), 4 * 520), ((512,), 512)])
def test_a_matrix_needs_a_number_per_row_and_column(shape: tuple[int, ...], numbers: int) -> None:
    """Sublinear memory, which is what it is for."""
    assert sum(array.size for array in slots(mx.zeros(shape)).values()) == numbers
