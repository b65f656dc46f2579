"""The GRPO objective, per completion token, as we run it. N counts the completion tokens of one micro-batch.

Departures from DeepSeekMath (arXiv:2402.03300), which introduced GRPO:
1. One gradient step per batch, so the ratio is against the sampler, which may be some versions old (asynchrony).
2. The mean is over all completion tokens of the whole update, not per sequence first (DAPO, arXiv:2503.14476,
   section 3.3): long answers are not discounted, and any split into micro-batches gives the same gradient.
3. The clip range is asymmetric (clip-higher, DAPO section 3.1).
4. The KL penalty and the entropy bonus are not weighted by the importance correction.
5. Log-ratios are clamped to plus or minus 20 nats; beyond that their gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import mlx.core as mx

from actors.compute.kl import ESTIMATORS, bounded_log_ratio, k3
from protocols.profile import LearnerSection


class Surrogate(NamedTuple):
    """Value of the clipped surrogate per token, to be maximised, and where its clipped branch was the smaller one."""

    objective_N: mx.array
    clipped_N: mx.array


class Anchor(NamedTuple):
    """What the ratio is taken against, and what each token weighs; neither carries a gradient."""

    logp_old_N: mx.array
    weight_N: mx.array


class TokenSums(NamedTuple):
    """Sums over the tokens of a micro-batch, each a float32 scalar; divide by a count of tokens for the mean."""

    loss: mx.array
    kl: mx.array
    entropy: mx.array
    clipped: mx.array
    ratio: mx.array
    mismatch: mx.array


class LossInputs(NamedTuple):
    """What the loss needs per completion token, all (N,) float32 and free of gradients.

    behaviour_N: log-probability under the sampler. reference_N: under the reference policy, or None without penalty.
    weight_N: 1 for tokens, 0 for padding. fresh_N: 1 where the learner's own weights drew the token.
    """

    behaviour_N: mx.array
    advantage_N: mx.array
    weight_N: mx.array
    fresh_N: mx.array
    reference_N: mx.array | None


Correction = Callable[[mx.array, mx.array, float], Anchor]


def clipped_surrogate(
    logp_N: mx.array, logp_old_N: mx.array, advantage_N: mx.array, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Bound the gain of moving away from the policy that the ratio is taken against.

    J_t = min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t), rho_t = exp(logp_t - logp_old_t)
    PPO (arXiv:1707.06347), equation 7, with the two-sided range of DAPO (arXiv:2503.14476), section 3.1.
    All (N,), natural logs. At rho = 1 the gradient is that of A logp (REINFORCE). It is zero where the branch is
    clipped: A > 0 and rho > 1 + clip_high, or A < 0 and rho < 1 - clip_low. A = 0 gives 0 and is never clipped.
    """
    rho_N = mx.exp(bounded_log_ratio(logp_N, logp_old_N))
    free_N = rho_N * advantage_N
    bounded_N = mx.clip(rho_N, 1.0 - clip_low, 1.0 + clip_high) * advantage_N
    return Surrogate(mx.minimum(free_N, bounded_N), bounded_N < free_N)


def against_sampler(logp_N: mx.array, behaviour_N: mx.array, cap: float) -> Anchor:
    """Take the ratio against the sampler's log-probabilities; every token weighs 1 and `cap` plays no part."""
    return Anchor(behaviour_N, mx.ones_like(behaviour_N))


def truncated_importance(logp_N: mx.array, behaviour_N: mx.array, cap: float) -> Anchor:
    """Take the ratio against the learner itself, and weigh tokens by how much likelier the learner finds them.

    w_t = min(exp(sg(logp_t) - behaviour_t), cap)   IMPALA (arXiv:1802.01561), section 4.1, applied per token to the
    mismatch of sampler and learner (fengyao.notion.site/off-policy-rl). One pass per update: sg(logp) is the policy at
    the start of the step, the ratio is 1, and clipping never acts. Where both agree w = 1: plain policy gradient.
    """
    learner_N = mx.stop_gradient(logp_N)
    return Anchor(learner_N, mx.minimum(mx.exp(bounded_log_ratio(learner_N, behaviour_N)), cap))


CORRECTIONS: Mapping[str, Correction] = MappingProxyType({"none": against_sampler, "truncate": truncated_importance})
"""`learner.correction` -> anchor(log pi, log of the sampler, cap)."""


def grpo_loss(
    logp_N: mx.array, entropy_N: mx.array, inputs: LossInputs, *, settings: LearnerSection, total_tokens: int
) -> tuple[mx.array, TokenSums]:
    """Loss of one micro-batch, to be minimised; the losses of all micro-batches of an update add up to its loss.

    L = 1/T sum_t m_t (-w_t J_t + kl_beta KL_t - entropy_weight H_t), T = `total_tokens` of the whole update.
    logp_N, entropy_N: (N,) float32 nats, with gradient. Returns the scalar loss and sums without gradients, among them
    the ratio learner/sampler (whatever it is clipped against) and k3 of sampler against learner on the fresh tokens.
    """
    mask_N = inputs.weight_N
    anchor = CORRECTIONS[settings.correction](logp_N, inputs.behaviour_N, settings.correction_cap)
    surrogate = clipped_surrogate(
        logp_N, anchor.logp_old_N, inputs.advantage_N, clip_low=settings.clip_low, clip_high=settings.clip_high
    )
    loss_N = -anchor.weight_N * surrogate.objective_N
    kl_N = mx.zeros_like(logp_N)
    if inputs.reference_N is not None:
        kl_N = ESTIMATORS[settings.kl_estimator](logp_N, inputs.reference_N)
        loss_N = loss_N + settings.kl_beta * kl_N
    if settings.entropy_weight > 0:
        loss_N = loss_N - settings.entropy_weight * entropy_N
    loss = mx.sum(mask_N * loss_N) / total_tokens
    ratio_N = mx.exp(bounded_log_ratio(logp_N, inputs.behaviour_N))
    sums = TokenSums(
        loss=loss * total_tokens,
        kl=mx.sum(mask_N * kl_N),
        entropy=mx.sum(mask_N * entropy_N),
        clipped=mx.sum(mask_N * surrogate.clipped_N),
        ratio=mx.sum(mask_N * ratio_N),
        mismatch=mx.sum(mask_N * inputs.fresh_N * k3(inputs.behaviour_N, logp_N)),
    )
    return loss, TokenSums(*(mx.stop_gradient(value) for value in sums))
