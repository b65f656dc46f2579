"""Importance corrections for the mismatch of sampler and learner: w = pi_prox / mu, per token or per completion.

mu is the rollout policy, pi_prox the policy at the start of the batch. Truncation, masking and rejection bound the
variance of the weights. Weights carry no gradient. They are not used with a ratio that is against the sampler already
(`learner.objective.ratio_reference = "sampler"`), because the mismatch would count twice. The denominators of the
aggregation are those before any rejection. Tokens with loss mask 0 are in no sum and in no mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from clotho.settings.objectives import (
    BoundedCorrection,
    MaskCorrection,
    ObjectiveSettings,
    RatioObjective,
    RejectGeometricCorrection,
    RejectSequenceCorrection,
    TruncateCorrection,
    TruncateSequenceCorrection,
)
from clotho.training.objectives.contract import ObjectiveInputs

Corrected = tuple[mx.array, mx.array]
"""Weight of each token, and whether the correction truncates the weight or rejects the token, (N,) each."""

Correction = Callable[[mx.array, ObjectiveInputs, float, float], Corrected]


def truncate(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> Corrected:
    """Return clip(w_t, low, high): truncated importance sampling, IMPALA (arXiv:1802.01561), section 4.1.

    For the mismatch of sampler and learner: fengyao.notion.site/off-policy-rl (TIS, low 0, high 2).
    """
    return _truncated(mx.exp(log_ratio_N), low, high)


def mask(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> Corrected:
    """Return w_t if low <= w_t <= high, else 0: IcePop, Ring-1T (arXiv:2510.18855), with 0.5 and 5."""
    ratio_N = mx.exp(log_ratio_N)
    weight_N = mx.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0)
    return weight_N, weight_N == 0


def truncate_sequence(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> Corrected:
    """Return the truncated weight of the completion for each of its tokens, clip(prod_t w_t, low, high).

    Unbiased for the reward of the completion while it is not truncated: richardli.xyz/rl-collapse (Seq-TIS).
    """
    return _truncated(tokens.spread_N(mx.exp(tokens.sum_B(log_ratio_N))), low, high)


def reject_sequence(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> Corrected:
    """Return 1 for completions with low <= prod_t w_t <= high, else 0.

    The rejection of masked importance sampling, richardli.xyz/rl-collapse (Seq-MIS), with a departure that
    docs/numerics.md lists.
    """
    return _inside(tokens.spread_N(mx.exp(tokens.sum_B(log_ratio_N))), low, high)


def reject_geometric(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> Corrected:
    """Return 1 for completions with low <= exp(mean_t log w_t) <= high, else 0.

    The geometric mean does not grow with length: richardli.xyz/rl-collapse (Geo-RS), with 0.99 and 1.01 (SkyRL).
    """
    return _inside(tokens.spread_N(mx.exp(tokens.mean_B(log_ratio_N))), low, high)


def _truncated(ratio_N: mx.array, low: float, high: float) -> Corrected:
    weight_N = mx.clip(ratio_N, low, high)
    return weight_N, weight_N != ratio_N


def _inside(ratio_N: mx.array, low: float, high: float) -> Corrected:
    weight_N = ((ratio_N >= low) & (ratio_N <= high)).astype(mx.float32)
    return weight_N, weight_N == 0


CORRECTIONS: Mapping[type[BoundedCorrection], Correction] = MappingProxyType(
    {
        TruncateSequenceCorrection: truncate_sequence,
        RejectGeometricCorrection: reject_geometric,
        TruncateCorrection: truncate,
        MaskCorrection: mask,
        RejectSequenceCorrection: reject_sequence,
    }
)
"""Struct of the correction -> correction(log w, tokens, low, high)."""


def without_outliers(log_ratio_N: mx.array, tokens: ObjectiveInputs, low: float, high: float) -> mx.array:
    """Return 0 for completions with any token whose ratio learner / sampler is outside [low, high], else 1: (N,).

    A bound of 0 is off. One token with a broken log-probability makes the rest of its completion unreliable.
    """
    bottom = math.log(low) if low > 0 else -math.inf
    top = math.log(high) if high > 0 else math.inf
    outside_N = (log_ratio_N < bottom) | (log_ratio_N > top)
    return tokens.spread_N((tokens.sum_B(outside_N.astype(mx.float32)) == 0).astype(mx.float32))


def off_policy_mask(learner_N: mx.array, tokens: ObjectiveInputs, delta: float) -> mx.array:
    """Return 0 for completions of negative advantage with mean_t(log mu - log pi) > delta, else 1: (N,).

    Off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556): the policy has become unlikely to sample them again.
    pi is the current policy, mu the rollout policy. The advantage is the mean over the tokens.
    """
    gone_B = tokens.mean_B(tokens.rollout_logp_N - learner_N) > delta
    dropped_B = (tokens.mean_B(tokens.advantage_N) < 0) & gone_B
    return tokens.spread_N((~dropped_B).astype(mx.float32))


class CorrectionWeights(NamedTuple):
    """Factors of the loss of each token, (N,), without gradient.

    weight_N: product of the importance correction and of the masks that are on. limited_N: true where the correction
    truncates or rejects. kept_N: product of the masks, 1 or 0.
    """

    weight_N: mx.array
    limited_N: mx.array
    kept_N: mx.array


def correction_weights(
    learner_N: mx.array, proximal_N: mx.array, tokens: ObjectiveInputs, settings: ObjectiveSettings
) -> CorrectionWeights:
    """Return the weights of correction and masks, from log-probabilities of the current and the batch-start policy."""
    log_ratio_N = mx.stop_gradient(proximal_N) - tokens.rollout_logp_N
    weight_N = kept_N = mx.ones_like(log_ratio_N)
    limited_N = mx.zeros(log_ratio_N.shape, dtype=mx.bool_)
    if isinstance(settings, RatioObjective) and isinstance(settings.importance_correction, BoundedCorrection):
        correction = settings.importance_correction
        correct = CORRECTIONS[type(correction)]
        weight_N, limited_N = correct(log_ratio_N, tokens, correction.low, correction.high)
    if settings.outlier_low > 0 or settings.outlier_high > 0:
        moved_N = learner_N - tokens.rollout_logp_N
        kept_N = without_outliers(moved_N, tokens, settings.outlier_low, settings.outlier_high)
        weight_N = weight_N * kept_N
    if settings.off_policy_mask > 0:
        on_policy_N = off_policy_mask(learner_N, tokens, settings.off_policy_mask)
        weight_N, kept_N = weight_N * on_policy_N, kept_N * on_policy_N
    return CorrectionWeights(weight_N, limited_N, kept_N)


def interpolated_proximal(
    logp_current_N: mx.array,
    rollout_logp_N: mx.array,
    version_behaviour_N: mx.array,
    version_proximal: float,
    version_current: float,
) -> mx.array:
    """Approximate the log-probabilities of the policy at the start of the batch: (N,), without gradient.

    log pi_prox = log mu + alpha * (log pi - log mu), alpha = (v_prox - v_mu) / (v_pi - v_mu), where v_mu is the policy
    version that sampled the token: AReaL's log-linear approximation (its documentation, algorithms/prox_approx).
    Versions may be fractional: gradient k of an update with K optimizer steps is at v_prox + k / K. If v_pi = v_mu,
    alpha is 1: the current policy, without ratio and clipping. In the first step of an update, v_pi = v_prox and the
    result is exact. alpha is clamped to [0, 1].
    """
    behind_N = version_proximal - version_behaviour_N.astype(mx.float32)
    age_N = behind_N + (version_current - version_proximal)
    alpha_N = mx.where(age_N == 0, 1.0, mx.clip(behind_N / mx.where(age_N == 0, 1.0, age_N), 0.0, 1.0))
    return rollout_logp_N + alpha_N * (mx.stop_gradient(logp_current_N) - rollout_logp_N)
