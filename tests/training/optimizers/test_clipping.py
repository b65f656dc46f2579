"""Size of a gradient, and its bound."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from clotho.training.optimizers.clipping import clip_scale, global_norm


def test_the_norm_is_that_of_all_gradients_as_one_vector() -> None:
    """3, 4 and 12: norm 13."""
    assert global_norm({"a": mx.array([3.0, 4.0]), "b": mx.array([[12.0]])}).item() == pytest.approx(13.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_makes_the_norm_not_finite(bad: float) -> None:
    """It is what the guard looks at."""
    norm = global_norm({"a": mx.array([1.0, bad]), "b": mx.array([2.0])})
    assert not mx.isfinite(norm).item()


@pytest.mark.parametrize(
    ("norm", "most", "scale"), [(5.0, 2.0, 0.4), (1.0, 2.0, 1.0), (5.0, 0.0, 1.0), (0.0, 2.0, 1.0)]
)
def test_clipping_only_ever_shortens(norm: float, most: float, scale: float) -> None:
    """Norm 5 to 2: 0.4; norm 1 stays; a maximum of 0 turns clipping off; a zero gradient is no division by zero."""
    assert clip_scale(norm, most) == scale
