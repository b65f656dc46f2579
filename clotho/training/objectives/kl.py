"""Per-token estimators of KL(policy || reference), from tokens that were sampled.

With d = log pi_ref(x) - log pi(x), x sampled from pi (J. Schulman, "Approximating KL divergence", 2020):
k1 and k3 are unbiased, k2 and abs are not; all but k1 are never negative and all are 0 at d = 0. As penalties their
gradients differ in kind: that of k1 has expectation zero under the policy's own samples, that of k2 is the gradient of
KL(policy || reference), that of k3 the gradient of KL(reference || policy). `ratio_weighted` repairs k1 and k3.

Departure from the source: d is clamped to [-20, 20] nats, beyond which the value stays and the gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import mlx.core as mx

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this many nats, so that their exponentials stay finite in float32."""

Estimator = Callable[[mx.array, mx.array], mx.array]


def bounded_log_ratio(numerator_N: mx.array, denominator_N: mx.array) -> mx.array:
    """Difference of two log-probabilities in nats, clamped to plus or minus `MAX_LOG_RATIO`."""
    return mx.clip(numerator_N - denominator_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def k1(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Log-ratio: -d. Unbiased, may be negative. (N,) nats."""
    return bounded_log_ratio(logp_N, reference_N)


def k2(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Half the squared log-ratio: d^2 / 2. Biased, low variance. (N,) nats."""
    return 0.5 * mx.square(bounded_log_ratio(reference_N, logp_N))


def k3(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Estimate by exp(d) - 1 - d: unbiased and not negative (GRPO's: arXiv:2402.03300, equation 4). (N,) nats.

    Computed with expm1, without which small d would drown in rounding.
    """
    d_N = bounded_log_ratio(reference_N, logp_N)
    return mx.expm1(d_N) - d_N


def absolute(logp_N: mx.array, reference_N: mx.array) -> mx.array:
    """Size of the log-ratio: |d|. Biased; its gradient does not fade near d = 0, where it is 0. (N,) nats."""
    return mx.abs(bounded_log_ratio(reference_N, logp_N))


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3, "abs": absolute})
"""`learner.kl_penalty.estimator` -> estimator(log pi, log pi_ref)."""


def ratio_weighted(estimate_N: mx.array, logp_N: mx.array, rollout_logp_N: mx.array) -> mx.array:
    """Estimate under the policy itself from the sampler's tokens, gradient included: pi / mu times the estimate.

    DeepSeek-V3.2 (arXiv:2512.02556), the unbiased KL estimate, with k3. The gradient flows through the ratio too, which
    makes value and gradient of k1 and k3 unbiased for KL(policy || reference), whatever drew the tokens; those of k2
    and abs become unbiased for their own expectations. At pi = mu the value is the plain estimate. All (N,), nats.
    """
    return mx.exp(bounded_log_ratio(logp_N, rollout_logp_N)) * estimate_N
