"""Objectives whose importance ratio is that of each token: clipped surrogates, policy gradients and soft trust regions.

Departures from the papers, for all objectives in this package:
1. By default the ratio of a token is against the sampler, which may be some versions old (asynchrony). With
   `ratio_reference = "batch_start"` it is against the policy at the start of the batch (`ppo_decoupled`).
2. Log-ratios are clamped to plus or minus 20 nats; beyond, their gradient is zero.
3. An objective is the loss of tokens. The papers' choices of advantage, aggregation and KL penalty are the defaults of
   the objective's settings (`clotho.settings.objectives`).
"""

from __future__ import annotations

import mlx.core as mx

from clotho.settings.objectives import (
    Bnpo,
    Cispo,
    ClippedObjective,
    Dapo,
    DppoTv,
    DrGrpo,
    Grpo,
    ObjectiveSettings,
    PpoDecoupled,
    Reinforce,
    ReinforcePlusPlus,
    Sapo,
)
from clotho.training.objectives.contract import Objective, ObjectiveInputs, PolicyLoss
from clotho.training.objectives.kl import bounded_log_ratio


def clipped(ratio_N: mx.array, advantage_N: mx.array, settings: ClippedObjective) -> PolicyLoss:
    """The clipped surrogate: bound the gain of moving away from the old policy. All (N,).

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    PPO (arXiv:1707.06347), equation 7, with the two-sided range of DAPO (arXiv:2503.14476), section 3.1. If A < 0 and
    dual_clip = c > 0, L_t = min(L_t, c |A_t|): dual-clip PPO (arXiv:1912.09729), which requires c > 1 and uses 3. A
    token counts as clipped where the loss is flat: A > 0 and r > 1 + clip_high, A < 0 and r < 1 - clip_low, or A < 0
    and r > c. A = 0 gives 0 and is never clipped.
    """
    free_N = ratio_N * advantage_N
    bounded_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_N
    gain_N, clipped_N = mx.minimum(free_N, bounded_N), bounded_N < free_N
    if settings.dual_clip > 0:
        floor_N = mx.where(advantage_N < 0, settings.dual_clip * advantage_N, -mx.inf)
        gain_N, clipped_N = mx.maximum(gain_N, floor_N), clipped_N | (floor_N > gain_N)
    return PolicyLoss(-gain_N, clipped_N)


def clipped_surrogate(logp_N: mx.array, tokens: ObjectiveInputs, settings: ClippedObjective) -> PolicyLoss:
    """`clipped` with the ratio of each token, r_t = pi(t) / pi_old(t).

    At r = 1 the gradient of the loss is that of -A log pi (REINFORCE).
    """
    return clipped(mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N)), tokens.advantage_N, settings)


def grpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Grpo) -> PolicyLoss:
    """Group Relative Policy Optimization, DeepSeekMath (arXiv:2402.03300), equation 3.

    Settings: rewards centered and scaled by their group. Departures: see the module; the mean is that over the tokens
    of the batch and the clip range that of DAPO (the paper: mean over completions of the mean over tokens, 0.2); an
    epsilon is added to the standard deviation; the paper's KL penalty (k3, 0.04) is off by default.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def dr_grpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: DrGrpo) -> PolicyLoss:
    """GRPO Done Right (arXiv:2503.20783): GRPO without its two biased divisions.

    Settings: rewards are centered but not scaled, so that easy and hard prompts have equal weight; token losses are
    summed and divided by a constant (`sampling.max_tokens`), so that long wrong answers are not discounted.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def bnpo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Bnpo) -> PolicyLoss:
    """GRPO normalized by the tokens of the batch: the loss type `bnpo` of TRL.

    Settings: GRPO's advantage and the mean over all tokens. Departure: TRL divides by the tokens of the local micro-
    batch, which makes the loss depend on the split; here it is the whole batch. It is not the Beta normalization of
    rewards of the paper with the same initials.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def dapo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Dapo) -> PolicyLoss:
    """Decoupled Clip and Dynamic Sampling Policy Optimization (arXiv:2503.14476).

    Settings: clip-higher (section 3.1: 0.2 and 0.28), dynamic sampling (3.2), the mean over all tokens of the batch
    (3.3). The soft overlong punishment (3.4) depends on the length of completions: set `overlong_penalty` (the paper's
    buffer is a fifth of the longest length). No KL penalty.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def reinforce_plus_plus(logp_N: mx.array, tokens: ObjectiveInputs, settings: ReinforcePlusPlus) -> PolicyLoss:
    """REINFORCE++ with baseline (arXiv:2501.03262): advantages normalized over the batch.

    Settings: rewards centered by their group, divided by the standard deviation over the batch, the mean over all
    tokens. The paper's plain form, one completion per prompt, is the advantage `batch`. The paper's KL penalty is k1 in
    the reward in the plain form and k2 in the loss with baseline; it is off by default.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def ppo_decoupled(logp_N: mx.array, tokens: ObjectiveInputs, settings: PpoDecoupled) -> PolicyLoss:
    """Decoupled PPO: clip around the policy at the start of the batch, correct staleness by an importance weight.

    L_t = -w_t min(u_t A_t, clip(u_t) A_t), u = pi / pi_prox, w = pi_prox / mu: AReaL (arXiv:2505.24298) after Hilton et
    al. (arXiv:2110.00641). Settings: `ratio_reference = "batch_start"`, and w bounded as in AReaL's code: tokens with w
    > 5 are masked. With one optimizer step per batch, u = 1 and nothing is clipped. Departures: advantages of the group
    instead of advantages whitened over the batch; no critic.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def reinforce(logp_N: mx.array, tokens: ObjectiveInputs, settings: Reinforce) -> PolicyLoss:
    """The policy gradient, L_t = -A_t log pi(t): Williams, "Simple statistical gradient-following algorithms" (1992).

    There is no importance ratio and no clipping. Settings: staleness is corrected by the truncated importance weight
    (TIS) against the policy at the start of the batch. The value of the loss has no meaning; only the gradient does.
    """
    return PolicyLoss(-tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def cispo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Cispo) -> PolicyLoss:
    """Clipped IS-weight Policy Optimization, MiniMax-M1 (arXiv:2506.13585): clip the weight instead of the gain.

    L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t). Tokens that the update moves far keep their
    gradient, with a bounded weight. Settings: no lower bound (clip_low = 1), weights of at most 5 (TRL's advice after
    ScaleRL, arXiv:2510.13786; MiniMax gives no number), the mean over all tokens. clipped_N marks clipped weights;
    these tokens still have a gradient.
    """
    ratio_N = mx.exp(bounded_log_ratio(mx.stop_gradient(logp_N), tokens.old_logp_N))
    weight_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * logp_N, weight_N != ratio_N)


def sapo(logp_N: mx.array, tokens: ObjectiveInputs, settings: Sapo) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a sigmoid instead of the clip.

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with one tau for A > 0 and one for other advantages. The gradient is
    that of -A r times 4 p (1 - p), p = sigmoid(tau (r - 1)): exactly 1 at r = 1, decreasing on both sides, faster with
    a larger tau; the paper uses 1.05 for negative advantages and 1 for positive ones. The value at r = 1 is -2 A / tau.
    Nothing is clipped.
    """
    ratio_N = mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N))
    tau_N = mx.where(tokens.advantage_N > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    gate_N = 4.0 / tau_N * mx.sigmoid(tau_N * (ratio_N - 1.0))
    return PolicyLoss(-gate_N * tokens.advantage_N, mx.zeros_like(logp_N))


def dppo_tv(logp_N: mx.array, tokens: ObjectiveInputs, settings: DppoTv) -> PolicyLoss:
    """Divergence PPO (arXiv:2602.04879) with the binary total variation: a trust region in probabilities.

    L_t = -k_t A_t r_t + quadratic_kl (log r_t)^2, r_t = pi(t) / mu(t), mu the sampler. k_t = 0 if the token has moved
    far already and would be moved further: A > 0 and pi - mu > clip_high, or A < 0 and pi - mu < -clip_low; else 1. |pi
    - mu| is the total variation between the two policies as far as this token shows it; a ratio would overestimate it
    for rare tokens and underestimate it for likely ones. With clips of 1, never reached, it is plain importance
    sampling. The squared log-ratio also applies to masked tokens; docs/numerics.md says where it is from. The ratio is
    always against the sampler.
    """
    log_ratio_N = bounded_log_ratio(logp_N, tokens.rollout_logp_N)
    moved_N = mx.stop_gradient(mx.exp(logp_N) - mx.exp(tokens.rollout_logp_N))
    rose_N = (tokens.advantage_N > 0) & (moved_N > settings.clip_high)
    fell_N = (tokens.advantage_N < 0) & (moved_N < -settings.clip_low)
    masked_N = rose_N | fell_N
    gain_N = mx.where(masked_N, 0.0, tokens.advantage_N * mx.exp(log_ratio_N))
    return PolicyLoss(settings.quadratic_kl * mx.square(log_ratio_N) - gain_N, masked_N)


OBJECTIVES: dict[type[ObjectiveSettings], Objective] = {
    Grpo: grpo,
    DrGrpo: dr_grpo,
    Bnpo: bnpo,
    Dapo: dapo,
    ReinforcePlusPlus: reinforce_plus_plus,
    PpoDecoupled: ppo_decoupled,
    Reinforce: reinforce,
    Cispo: cispo,
    Sapo: sapo,
    DppoTv: dppo_tv,
}
"""The objective function of each struct."""
