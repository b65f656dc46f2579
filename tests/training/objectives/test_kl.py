"""| reference)."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from clotho.training.objectives.kl import ESTIMATORS, MAX_LOG_RATIO, ratio_weighted

P = np.array([0.5, 0.3, 0.2])
Q = np.array([0.2, 0.2, 0.6])
MU = np.array([0.1, 0.6, 0.3])


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


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(name: str) -> None:
    """Averaged exactly over the policy, both are KL(policy || reference)."""
    values_V = np.array(ESTIMATORS[name](mx.array(np.log(P)), mx.array(np.log(Q))))
    assert float(P @ values_V) == pytest.approx(kl(P, Q), rel=1e-5)


@pytest.mark.parametrize("name", ["k2", "k3", "abs"])
def test_all_but_k1_are_nonnegative(name: str) -> None:
    """They are 0 if both policies agree."""
    values_N = estimates(name, np.linspace(-30.0, 30.0, 241))
    assert values_N.min() >= 0.0
    assert estimates(name, np.zeros(1))[0] == 0.0


def test_k3_is_accurate_for_almost_equal_policies() -> None:
    """exp(d) - 1 - d is about d^2/2. In float32 exp and a subtraction would lose 5e-7 completely."""
    value = np.array(ESTIMATORS["k3"](mx.array([0.0]), mx.array([1e-3])))[0]
    assert value == pytest.approx(math.expm1(1e-3) - 1e-3, rel=2e-3)


def softmax_gradient(name: str) -> np.ndarray:
    """Return the expected gradient of the estimator with respect to the policy's logits."""

    def gradient(token: int) -> np.ndarray:
        def estimate(logits_V: mx.array) -> mx.array:
            logp_V = logits_V - mx.logsumexp(logits_V)
            return ESTIMATORS[name](logp_V[token], mx.array(math.log(Q[token])))

        slope_V: np.ndarray = P[token] * np.array(mx.grad(estimate)(mx.array(np.log(P), dtype=mx.float32)))
        return slope_V

    slopes_V: np.ndarray = gradient(0) + gradient(1) + gradient(2)
    return slopes_V


def test_the_expected_gradient_of_k1_is_zero() -> None:
    """The sum of P grad log P is zero: as a penalty on sampled tokens k1 only adds noise."""
    np.testing.assert_allclose(softmax_gradient("k1"), np.zeros(3), atol=1e-6)


def test_the_gradient_of_k2_is_that_of_kl_policy_reference() -> None:
    """Sum_x P (log P - log Q) grad log P; for softmax logits: P_j (log P_j/Q_j - KL)."""
    np.testing.assert_allclose(softmax_gradient("k2"), P * (np.log(P / Q) - kl(P, Q)), atol=1e-6)


def test_the_gradient_of_k3_is_that_of_kl_reference_policy() -> None:
    """-sum_x Q grad log P; for softmax logits: P_j - Q_j."""
    np.testing.assert_allclose(softmax_gradient("k3"), P - Q, atol=1e-6)


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


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_ratio_weighted_estimates_are_unbiased_for_any_sampler(name: str) -> None:
    """Averaged exactly over the sampler mu: the value is KL(policy || reference), and the gradient is its gradient.

    For softmax logits the gradient is P_j (log P_j/Q_j - KL).
    """

    def expectation(logits_V: mx.array) -> mx.array:
        logp_V = logits_V - mx.logsumexp(logits_V)
        estimate_V = ESTIMATORS[name](logp_V, mx.array(np.log(Q), dtype=mx.float32))
        weighted_V = ratio_weighted(estimate_V, logp_V, mx.array(np.log(MU), dtype=mx.float32))
        return mx.sum(mx.array(MU, dtype=mx.float32) * weighted_V)

    value, slope_V = mx.value_and_grad(expectation)(mx.array(np.log(P), dtype=mx.float32))
    assert value.item() == pytest.approx(kl(P, Q), rel=1e-5)
    np.testing.assert_allclose(np.array(slope_V), P * (np.log(P / Q) - kl(P, Q)), atol=1e-6)


def test_ratio_weighting_changes_only_the_gradient_on_policy() -> None:
    """The ratio is 1, so the value is that of the plain estimate."""
    logp_N, reference_N = mx.array([-1.0, -2.0]), mx.array([-0.5, -3.0])
    plain_N = ESTIMATORS["k3"](logp_N, reference_N)
    np.testing.assert_array_equal(np.array(ratio_weighted(plain_N, logp_N, logp_N)), np.array(plain_N))
