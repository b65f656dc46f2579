"""SGD against float64, MLX's own, and by hand."""

from __future__ import annotations

from typing import Any

import mlx.optimizers as optim
import pytest

from tests.training.optimizers.walks import assert_close, one_step, oracle, settings, walk, walk_of


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_several_steps_equal_a_numpy_reference(momentum: float) -> None:
    """A decaying sum, not an average, with decoupled decay."""
    v: dict[str, Any] = {}

    def move(name: str, theta: Any, g: Any, t: int, rate: float) -> Any:
        v[name] = momentum * v.get(name, 0.0) + g
        return theta - rate * (v[name] + 0.1 * theta)

    expected = oracle(move, 6)
    assert_close(walk(settings("sgd", momentum=momentum, weight_decay=0.1), 6)[0], expected)


def test_several_steps_equal_mlx_without_decay() -> None:
    """Its decay is L2: added to the gradient, so that momentum gathers it; ours is decoupled."""
    assert_close(walk(settings("sgd", momentum=0.7), 4)[0], walk_of(optim.SGD(0.0, momentum=0.7), 4))


def test_the_first_step_is_the_gradient_times_the_rate() -> None:
    """1 - 0.1 x 3 = 0.7."""
    assert one_step("sgd", [1.0], [3.0]) == pytest.approx([0.7])
