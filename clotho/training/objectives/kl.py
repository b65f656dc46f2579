"""Per-token estimators of KL(policy || reference) from sampled tokens.

With d = log pi_ref(x) - log pi(x), x sampled from pi (J. Schulman, "Approximating KL divergence", 2020): k1 and k3 are
unbiased, k2 and abs are not. All but k1 are non-negative, and all are 0 at d = 0. As penalties, their gradients differ:
the gradient of k1 has expectation zero under the policy's own samples, that of k2 is the gradient of
KL(policy || reference), and that of k3 is the gradient of KL(reference || policy). `ratio_weighted` corrects k1 and k3.

Departure from the source: d is clamped to [-20, 20] nats; beyond, the value is constant and the gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import mlx.core as mx

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios in nats, so that their exponentials stay finite in float32."""

Estimator = Callable[[mx.array, mx.array], mx.array]


def bounded_log_ratio(numerator_N: mx.array, denominator_N: mx.array) -> mx.array:
    """Return the difference of two log-probabilities in nats, clamped to plus or minus `MAX_LOG_RATIO`."""
    return mx.clip(numerator_N - denominator_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Return the log-ratio -d. Unbiased, can be negative. (N,) nats."""
    return bounded_log_ratio(logp_N, reference_N)


def k2(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Return half the squared log-ratio, d^2 / 2. Biased, low variance. (N,) nats."""
    return 0.5 * mx.square(bounded_log_ratio(reference_N, logp_N))


def k3(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Return exp(d) - 1 - d, by expm1. Unbiased and non-negative: GRPO (arXiv:2402.03300), equation 4. (N,) nats."""
    d_N = bounded_log_ratio(reference_N, logp_N)
    return mx.expm1(d_N) - d_N


def absolute(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Return |d|. Biased; the gradient does not vanish near d = 0, where it is 0. (N,) nats."""
    return mx.abs(bounded_log_ratio(reference_N, logp_N))


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3, "abs": absolute})
"""`learner.kl_penalty.estimator` -> estimator(log pi, log pi_ref)."""


def ratio_weighted(estimate_N: mx.array, logp_N: mx.array, rollout_logp_N: mx.array) -> mx.array:
    """Return the importance ratio pi / mu times the estimate, with the gradient through both. All (N,), nats.

    The unbiased KL estimate of DeepSeek-V3.2 (arXiv:2512.02556), with k3. It makes value and gradient of k1 and k3
    unbiased for KL(policy || reference) whichever policy sampled the tokens; k2 and abs become unbiased for their own
    expectations. At pi = mu the value is the plain estimate.
    """
    return mx.exp(bounded_log_ratio(logp_N, rollout_logp_N)) * estimate_N
