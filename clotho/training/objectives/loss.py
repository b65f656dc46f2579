"""The loss of a micro-batch and its metrics, the weights of tokens in it, and its coefficients from update to update.

N is the number of sampled tokens of the micro-batch, padding included. Departure from the papers: the importance
correction does not weight the KL penalty, the entropy bonus and the distillation loss.

The loss is the sum over trained tokens of loss weight times token loss. The weights are computed once for the whole
update, so that any split into micro-batches gives the same loss and the same gradient. Completions that are not trained
on (empty, or masked as truncated) have weight 0, and no denominator counts them, nor a group that has no other
completion. Completions that an importance correction rejects are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.settings.bounds import Off
from clotho.settings.learner import (
    AdaptiveCoefficient,
    AdaptiveEntropyBonus,
    FixedEntropyBonus,
    KLPenalty,
    LearnerSection,
    LossKLPenalty,
)
from clotho.settings.objectives import RatioObjective, Sft
from clotho.training.objectives.contract import Objective, ObjectiveInputs
from clotho.training.objectives.importance_correction import CorrectionWeights, correction_weights
from clotho.training.objectives.kl import ESTIMATORS, bounded_log_ratio, k3, ratio_weighted
from protocols.step import Cut


class TokenLossInputs(NamedTuple):
    """Inputs of the loss per sampled token: (N,), float32, without gradient.

    tokens: what the objective gets; the loss chooses its `old_logp_N`. proximal_N: log-probability under the policy at
    the start of the batch; None while that is the current policy. loss_weight_N: weight of the token in the loss of the
    update. on_policy_mask_N: 1 for tokens that the learner's current weights sampled. teacher_mask_N: 1 for tokens with
    a teacher; None without a teacher. teacher_logp_N: log-probability under a teacher of sampled tokens; None without
    one.
    """

    tokens: ObjectiveInputs
    proximal_N: mx.array | None
    loss_weight_N: mx.array
    on_policy_mask_N: mx.array
    teacher_mask_N: mx.array | None = None
    teacher_logp_N: mx.array | None = None


class LossCoefficients(NamedTuple):
    """Current coefficients of the KL penalty and the entropy bonus; see `next_loss_coefficients`."""

    kl_beta: float
    entropy_coef: float


MetricSums = dict[str, mx.array]
"""Metric name -> (2,) float32 without gradient: the sum over tokens, and the number of tokens it is the mean of.

`expert_load` has the tokens of each expert instead, then the number of tokens (`clotho.models.experts.expert_load`).
"""


def policy_loss(
    logp_N: mx.array,
    entropy_N: mx.array,
    inputs: TokenLossInputs,
    *,
    settings: LearnerSection,
    loss_coefficients: LossCoefficients,
    objective: Objective,
    cross_entropy_N: mx.array | None = None,
) -> tuple[mx.array, MetricSums, mx.array]:
    """Return the loss of one micro-batch, to be minimized, its metrics, and what limits the gradient of each token.

    Losses of micro-batches add up. The limits are values of `Cut`, (N,) uint8.

    L = sum_t c_t * m_t * (w_t * L_t + kl_beta * KL_t - entropy_coef * H_t + distillation_weight * C_t)

    with loss weight c, loss mask m, importance correction w and objective L_t. KL_t is in the loss only with a KL
    penalty of type `loss`. logp_N, entropy_N and C (the cross-entropy with the teacher's alternatives; None without a
    teacher) are (N,) float32 in nats, with gradient. Up to a constant, C is the forward KL(teacher || policy) over
    these alternatives (Hinton et al., arXiv:1503.02531) on tokens that the policy sampled (GKD, arXiv:2306.13649). A
    new metric is a line of `means`: its values and the mask of the tokens that it is the mean over. Raises ValueError
    for an importance correction of a ratio that is against the sampler already.
    """
    chosen = settings.objective
    if (
        isinstance(chosen, RatioObjective)
        and chosen.ratio_reference == "sampler"
        and not isinstance(chosen.importance_correction, Off)
    ):
        raise ValueError("an importance correction needs ratio_reference = 'batch_start': it would count twice")
    tokens = _tokens(logp_N, inputs, settings)
    token_loss = objective(logp_N, tokens, chosen)
    correction = correction_weights(logp_N, tokens.old_logp_N, tokens, chosen)
    loss_N = correction.weight_N * token_loss.loss_N
    kl_N = _penalty(logp_N, tokens, settings)
    if loss_coefficients.kl_beta > 0 and isinstance(settings.kl_penalty, LossKLPenalty):
        loss_N = loss_N + loss_coefficients.kl_beta * kl_N
    if loss_coefficients.entropy_coef > 0:
        loss_N = loss_N - loss_coefficients.entropy_coef * entropy_N
    if cross_entropy_N is not None:
        loss_N = loss_N + settings.distillation_weight * cross_entropy_N
    mask_N = tokens.loss_mask_N
    loss = mx.sum(inputs.loss_weight_N * mask_N * loss_N)
    ratio_N = mx.exp(bounded_log_ratio(logp_N, tokens.rollout_logp_N))
    cut_N = _cut(mask_N, correction, token_loss.clipped_N)
    on_policy_N = inputs.on_policy_mask_N * mask_N
    means = {
        "kl": (kl_N, mask_N),
        "entropy": (entropy_N, mask_N),
        "clip_fraction": (token_loss.clipped_N, mask_N),
        "clip_fraction_low": (mx.where(tokens.advantage_N < 0, token_loss.clipped_N, 0), mask_N),
        "clip_fraction_high": (mx.where(tokens.advantage_N > 0, token_loss.clipped_N, 0), mask_N),
        "ratio_mean": (ratio_N, mask_N),
        "ratio_squared_mean": (mx.square(ratio_N), mask_N),
        "rejected_fraction": (correction.weight_N == 0, mask_N),
        "mismatch_kl": (k3(tokens.rollout_logp_N, logp_N), on_policy_N),
        "unmoved_cut_fraction": ((cut_N == Cut.CLIP) | (cut_N == Cut.CORRECTION), on_policy_N),
    }
    if cross_entropy_N is not None and inputs.teacher_mask_N is not None:
        means["distillation_loss"] = (cross_entropy_N, inputs.teacher_mask_N * mask_N)
    means |= token_loss.means
    if isinstance(chosen, Sft):
        means["cross_entropy"] = (-logp_N, mask_N)
    sums = {name: _sum_and_count(value_N, mask_N) for name, (value_N, mask_N) in means.items()}
    return loss, sums, cut_N


def _cut(loss_mask_N: mx.array, correction: CorrectionWeights, clipped_N: mx.array) -> mx.array:
    """Return what limits the gradient of each token: a mask before a rejection, a clip and a truncation."""
    truncated_N = mx.where(correction.limited_N, Cut.CORRECTION, Cut.NONE)
    cut_N = mx.where(clipped_N != 0, Cut.CLIP, truncated_N)
    cut_N = mx.where(correction.limited_N & (correction.weight_N == 0), Cut.CORRECTION, cut_N)
    return mx.where(loss_mask_N * correction.kept_N == 0, Cut.MASK, cut_N).astype(mx.uint8)


def _sum_and_count(value_N: mx.array, mask_N: mx.array) -> mx.array:
    return mx.stop_gradient(mx.stack([mx.sum(mask_N * value_N), mx.sum(mask_N)]))


def _tokens(logp_N: mx.array, inputs: TokenLossInputs, settings: LearnerSection) -> ObjectiveInputs:
    """Choose the policy that the ratio is against, and add a teacher of sampled tokens to the advantages.

    A_t + distillation_weight (log T_t - log pi_t), without gradient: each token is judged by itself. At pi = mu and
    A = 0, the gradient is that of KL(policy || teacher) given the tokens before it, estimated from the sampled token
    (MiniLLM, arXiv:2306.08543, without the KL of later tokens). pi is the policy whose gradient is computed, not the
    one that sampled. So a policy that equals its teacher has no gradient, whichever policy sampled; importance weights
    apply as to rewards. The difference is clamped as in `kl`.
    """
    tokens, chosen, current_N = inputs.tokens, settings.objective, mx.stop_gradient(logp_N)
    if not chosen.has_ratio:  # nobody may have sampled the tokens: ratios are 1
        tokens = tokens._replace(rollout_logp_N=current_N)
    old_logp_N = tokens.rollout_logp_N
    if isinstance(chosen, RatioObjective) and chosen.ratio_reference != "sampler":
        old_logp_N = current_N if inputs.proximal_N is None else inputs.proximal_N
    if inputs.teacher_logp_N is not None:
        gap_N = mx.stop_gradient(bounded_log_ratio(inputs.teacher_logp_N, logp_N))
        tokens = tokens._replace(advantage_N=tokens.advantage_N + settings.distillation_weight * gap_N)
    return tokens._replace(old_logp_N=old_logp_N)


def _penalty(logp_N: mx.array, tokens: ObjectiveInputs, settings: LearnerSection) -> mx.array:
    """Return the estimate of KL(policy || reference), (N,) nats; 0 without a reference."""
    penalty = settings.kl_penalty
    if tokens.reference_logp_N is None or not isinstance(penalty, KLPenalty):
        return mx.zeros_like(logp_N)
    kl_N = ESTIMATORS[penalty.estimator](logp_N, tokens.reference_logp_N)
    weighted = isinstance(penalty, LossKLPenalty) and penalty.importance_weighted
    return ratio_weighted(kl_N, logp_N, tokens.rollout_logp_N) if weighted else kl_N


LARGEST_ERROR = 0.2
"""Bound of the relative error that the adaptive KL coefficient reacts to."""


def initial_loss_coefficients(settings: LearnerSection) -> LossCoefficients:
    """Return the coefficients of the first update: those of the profile."""
    penalty, bonus = settings.kl_penalty, settings.entropy_bonus
    return LossCoefficients(
        penalty.coef if isinstance(penalty, KLPenalty) else 0.0,
        0.0 if isinstance(bonus, Off) else bonus.coef,
    )


def next_loss_coefficients(
    loss_coefficients: LossCoefficients, *, kl: float, entropy: float, settings: LearnerSection
) -> LossCoefficients:
    """Return the coefficients after an update that measured `kl` and `entropy`, in nats per token.

    KL penalty, adaptive: the controller of Ziegler et al. (arXiv:1909.08593), equation 11, beta <- beta * (1 + e /
    horizon), e = clip(kl / target - 1, -0.2, 0.2); the paper has a horizon of 10.
    Entropy bonus, adaptive: up by `step` while the entropy is below `target`, else down by `step`, never below 0:
    adaptive entropy control, Skywork-OR1 (arXiv:2505.22312), with a departure that docs/numerics.md lists. fixed:
    coefficient <- coefficient * decay. No other coefficient changes, and none after a measurement that is not finite.
    """
    beta, weight = loss_coefficients
    penalty, bonus = settings.kl_penalty, settings.entropy_bonus
    if isinstance(penalty, KLPenalty) and isinstance(penalty.control, AdaptiveCoefficient) and math.isfinite(kl):
        error = min(max(kl / penalty.control.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
        beta *= 1.0 + error / penalty.control.horizon
    if isinstance(bonus, FixedEntropyBonus):
        weight *= bonus.decay
    elif isinstance(bonus, AdaptiveEntropyBonus) and math.isfinite(entropy):
        weight = max(0.0, weight + (bonus.step if entropy < bonus.target else -bonus.step))
    return LossCoefficients(beta, weight)


Lengths = Sequence[NDArray[np.float64]]
Coefficients = list[NDArray[np.float64]]


def token_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / T, T = trained tokens: DAPO (arXiv:2503.14476), section 3.3. Long completions have more weight."""
    share = _share(sum(float(length_G.sum()) for length_G in lengths))
    return [_where_trained(length_G, share) for length_G in lengths]


def sequence_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (T_i * S), T_i = tokens of the completion, S = completions: GRPO (arXiv:2402.03300), equation 3."""
    share = _share(_sequences(lengths))
    return [_where_trained(length_G, share / np.maximum(length_G, 1.0)) for length_G in lengths]


def token_sum(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (max_tokens * S), S = completions: the constant of Dr. GRPO (arXiv:2503.20783)."""
    share = _share(max_tokens * _sequences(lengths))
    return [_where_trained(length_G, share) for length_G in lengths]


def group_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (T_g * P), T_g = tokens of the group, P = groups: the prompt average of ScaleRL (arXiv:2510.13786)."""
    share = _share(sum(bool(length_G.any()) for length_G in lengths))
    return [_where_trained(length_G, share * _share(float(length_G.sum()))) for length_G in lengths]


def plain_sum(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1: the sum of all token losses, which several gradients of one step add up to, as in Tinker's API."""
    return [_where_trained(length_G, 1.0) for length_G in lengths]


AGGREGATIONS: Mapping[str, Callable[[Lengths, int], Coefficients]] = MappingProxyType({
    "token_mean": token_mean, "sequence_mean": sequence_mean, "token_sum": token_sum, "group_mean": group_mean,
    "sum": plain_sum,
})  # fmt: skip
"""`learner.objective.loss_aggregation` -> aggregation(lengths, max_tokens)."""


def loss_weights(kind: str, lengths: Sequence[Sequence[int]], *, max_tokens: int) -> Coefficients:
    """Return token weights of completions: (G,) float64 per group. lengths: trained tokens. kind: of `AGGREGATIONS`."""
    return AGGREGATIONS[kind]([np.asarray(lengths_G, dtype=np.float64) for lengths_G in lengths], max_tokens)


def _sequences(lengths: Lengths) -> int:
    return sum(int(np.count_nonzero(length_G)) for length_G in lengths)


def _share(parts: float) -> float:
    return 1.0 / parts if parts else 0.0


def _where_trained(length_G: NDArray[np.float64], share: float | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(length_G > 0, share, 0.0)
