"""| reference)."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.objectives.kl import ESTIMATORS, MAX_LOG_RATIO, ratio_weighted

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Return the sum of p log p/q in nats."""
    return float(np.sum(p * np.log(p / q)))


def estimates(name: str, d_N: np.ndarray) -> np.ndarray:
    """Estimates where log pi_ref - log pi = d, with log pi = -1 everywhere."""
    return np.array(ESTIMATORS[name](mx.full(d_N.shape, -1.0), mx.array(d_N - 1.0, dtype=mx.float32)))


@pytest.mark.parametrize(
    ("name", "value"),
    [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2)), ("abs", math.log(2))],
)
def test_estimates_of_a_reference_twice_as_likely(name: str, value: float) -> None:
    """d = ln 2: k1 = -d, k2 = d^2/2, k3 = 2 - 1 - d, abs = d."""
    assert estimates(name, np.array([math.log(2)]))[0] == pytest.approx(value, rel=1e-6)


def test_k3_is_accurate_for_almost_equal_policies() -> None:
    """exp(d) - 1 - d is about d^2/2. In float32 exp and a subtraction would lose 5e-7 completely."""
    value = np.array(ESTIMATORS["k3"](mx.array([0.0]), mx.array([1e-3])))[0]
    assert value == pytest.approx(math.expm1(1e-3) - 1e-3, rel=2e-3)


@pytest.mark.parametrize("name", list(ESTIMATORS))
@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_disjoint_policies_have_a_finite_value_and_no_gradient(name: str, d: float) -> None:
    """Log-ratios are clamped to +-20 nats."""
    value, gradient = mx.value_and_grad(lambda logp: ESTIMATORS[name](logp, mx.array(d)))(mx.array(0.0))
    assert value.item() == pytest.approx(float(estimates(name, np.array([math.copysign(MAX_LOG_RATIO, d)]))[0]))
    assert gradient.item() == 0.0


def test_ratio_weighting_by_hand() -> None:
    """log pi = -1, mu half as likely, reference twice as likely: d = ln 2, k3 = 1 - ln 2, weight 2: 2 - 2 ln 2.

    Gradient: that of the ratio, 2 (1 - ln 2), plus that of k3, 2 (1 - e^d) = -2; together -2 ln 2.
    """

    def estimate(logp: mx.array) -> mx.array:
        return ratio_weighted(ESTIMATORS["k3"](logp, mx.array(math.log(2) - 1)), logp, mx.array(-1 - math.log(2)))

    value, slope = mx.value_and_grad(estimate)(mx.array(-1.0))
    assert value.item() == pytest.approx(2 - 2 * math.log(2), rel=1e-5)
    assert slope.item() == pytest.approx(-2 * math.log(2), rel=1e-5)
