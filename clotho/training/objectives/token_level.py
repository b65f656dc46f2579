"""The clipped surrogate of PPO, and the objectives that share it: they differ in advantage, aggregation and anchor.

Departures from the papers, of all objectives in this package:
1. The ratio is against the sampler, which may be some versions old (asynchrony), or, with `ratio_reference = "batch_start"`,
   against the learner at the start of the batch (`ppo_decoupled`).
2. Log-ratios are clamped to plus or minus 20 nats; beyond that their gradient is zero.
3. An objective is the loss of tokens; what the papers write around it is in `advantages`, `aggregation` and `kl`, and
   a name brings its paper's choice of them along (`clotho.config.presets`).

Objectives that weigh log pi: the policy gradient itself, every token teaching something.

The departures listed in `clipped` hold here too. The value of these losses means little: only their gradient does.

Objectives whose trust region has no edge.

Objectives that stop where the policy has moved too far, by a divergence rather than by the ratio.
"""

from __future__ import annotations

import mlx.core as mx

from clotho.config.objectives import (
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
from clotho.training.objectives.contract import Objective, PolicyLoss, Tokens
from clotho.training.objectives.kl import bounded_log_ratio


def clipped(ratio_N: mx.array, advantage_N: mx.array, settings: ClippedObjective) -> PolicyLoss:
    """Bound the gain of moving away from the policy that the ratio is against.

    L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    PPO (arXiv:1707.06347), equation 7, with the two-sided range of DAPO (arXiv:2503.14476), section 3.1. Where A < 0
    and dual_clip = c > 0, L_t = min(L_t, c |A_t|): dual-clip PPO (arXiv:1912.09729), which means c > 1 and takes 3.
    Flat, hence clipped, where A > 0 and r > 1 + clip_high, where A < 0 and r < 1 - clip_low, and where dual clip acts:
    A < 0 and r > c. A = 0 gives 0 and is never clipped. All (N,).
    """
    free_N = ratio_N * advantage_N
    bounded_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantage_N
    gain_N, clipped_N = mx.minimum(free_N, bounded_N), bounded_N < free_N
    if settings.dual_clip > 0:
        floor_N = mx.where(advantage_N < 0, settings.dual_clip * advantage_N, -mx.inf)
        gain_N, clipped_N = mx.maximum(gain_N, floor_N), clipped_N | (floor_N > gain_N)
    return PolicyLoss(-gain_N, clipped_N)


def clipped_surrogate(logp_N: mx.array, tokens: Tokens, settings: ClippedObjective) -> PolicyLoss:
    """`clipped` with the ratio of each token by itself, r_t = pi(t) / anchor(t).

    At r = 1 the gradient of the loss is that of -A log pi (REINFORCE).
    """
    return clipped(mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N)), tokens.advantage_N, settings)


def grpo(logp_N: mx.array, tokens: Tokens, settings: Grpo) -> PolicyLoss:
    """Group Relative Policy Optimization, DeepSeekMath (arXiv:2402.03300), equation 3.

    The recipe makes the rest of it: rewards centred and scaled by their group, the mean over sequences of the mean
    over tokens. Departures: see the module; the deviation carries an epsilon, and the paper's KL penalty (k3) is there
    with `kl_beta` only (the paper: 0.04).
    """
    return clipped_surrogate(logp_N, tokens, settings)


def dr_grpo(logp_N: mx.array, tokens: Tokens, settings: DrGrpo) -> PolicyLoss:
    """GRPO Done Right (arXiv:2503.20783): without the two divisions that bias GRPO.

    The recipe: rewards are centred but not scaled, so that easy and hard questions weigh the same; and token losses are
    summed and divided by a constant (`sampling.max_tokens`), so that long wrong answers are not discounted.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def bnpo(logp_N: mx.array, tokens: Tokens, settings: Bnpo) -> PolicyLoss:
    """GRPO normalised by the tokens of the batch: the loss type `bnpo` of TRL.

    The recipe: GRPO's advantage, and the mean over all tokens. Departure: TRL divides by the tokens of the local
    micro-batch, which makes the loss depend on the split; here it is the whole batch. Not the Beta normalisation of
    rewards that a paper of the same initials proposes.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def dapo(logp_N: mx.array, tokens: Tokens, settings: Dapo) -> PolicyLoss:
    """Decoupled Clip and Dynamic Sampling Policy Optimization (arXiv:2503.14476).

    The recipe: clip-higher (section 3.1: 0.2 and 0.28), dynamic sampling (3.2), the mean over all tokens of the batch
    (3.3). Its soft overlong punishment (3.4) depends on the length of completions: set `overlong_buffer` (the paper:
    a fifth of the longest). No KL penalty.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def reinforce_plus_plus(logp_N: mx.array, tokens: Tokens, settings: ReinforcePlusPlus) -> PolicyLoss:
    """REINFORCE++ with baseline (arXiv:2501.03262): advantages normalised over the batch instead of the group.

    The recipe: rewards centred by their group and then divided by the deviation over the batch, the mean over all
    tokens. The paper's plain form, one completion per prompt, is `advantage = "batch"`. Its KL penalty is k1 in the
    reward in the plain form, k2 in the loss with baseline: set `kl_beta`, `kl_estimator` and `kl_in`.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def ppo_decoupled(logp_N: mx.array, tokens: Tokens, settings: PpoDecoupled) -> PolicyLoss:
    """Decoupled PPO: the clip is around a recent policy, and the sampler's age is corrected for by a weight.

    L_t = -w_t min(u_t A_t, clip(u_t) A_t), u = pi / pi_prox, w = pi_prox / mu: AReaL (arXiv:2505.24298) after
    Hilton et al. (arXiv:2110.00641). The recipe: `ratio_reference = "batch_start"`, and w (see `corrections`) as AReaL's code
    bounds it: tokens of w > 5 are left out. With one optimizer step a batch u = 1 and nothing is clipped. Departures:
    advantages of the group rather than whitened over the batch; no critic.
    """
    return clipped_surrogate(logp_N, tokens, settings)


def reinforce(logp_N: mx.array, tokens: Tokens, settings: Reinforce) -> PolicyLoss:
    """The policy gradient, L_t = -A_t log pi(t): Williams, "Simple statistical gradient-following algorithms" (1992).

    There is no ratio. Samples of another policy are what a correction is for: the recipe brings `ratio_reference = "batch_start"`
    and the truncated weight (TIS). Nothing is ever clipped.
    """
    return PolicyLoss(-tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def cispo(logp_N: mx.array, tokens: Tokens, settings: Cispo) -> PolicyLoss:
    """Clipped IS-weight Policy Optimization, MiniMax-M1 (arXiv:2506.13585): bound the weight, not the gain.

    L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t). Rare tokens that the update moves far keep their
    gradient, with a bounded weight. The recipe: no lower bound (clip_low = 1), weights of at most 5 (TRL's advice after
    ScaleRL, arXiv:2510.13786; MiniMax names no number), the mean over all tokens. clipped_N is where the weight is
    cut; these tokens teach all the same.
    """
    ratio_N = mx.exp(bounded_log_ratio(mx.stop_gradient(logp_N), tokens.old_logp_N))
    weight_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * logp_N, weight_N != ratio_N)


def sapo(logp_N: mx.array, tokens: Tokens, settings: Sapo) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a sigmoid in the place of the clip.

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau = sapo_tau_pos where A > 0, else sapo_tau_neg. The gradient is
    that of -A r, times 4 p (1 - p) with p = sigmoid(tau (r - 1)): exactly 1 at r = 1, fading on both sides, and faster
    with a larger tau; the paper takes 1.05 for negative advantages, 1 for positive ones. The value at r = 1 is -2 A /
    tau. Nothing is clipped. Departure: log-ratios are clamped to plus or minus 20 nats.
    """
    ratio_N = mx.exp(bounded_log_ratio(logp_N, tokens.old_logp_N))
    tau_N = mx.where(tokens.advantage_N > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    gate_N = 4.0 / tau_N * mx.sigmoid(tau_N * (ratio_N - 1.0))
    return PolicyLoss(-gate_N * tokens.advantage_N, mx.zeros_like(logp_N))


def dppo_tv(logp_N: mx.array, tokens: Tokens, settings: DppoTv) -> PolicyLoss:
    """Divergence PPO (arXiv:2602.04879) with the binary total variation: the trust region is in probabilities.

    L_t = -k_t A_t r_t + quadratic_kl (log r_t)^2, r_t = pi(t) / mu(t), mu the sampler. k_t = 0 where the token has
    moved far already, and would be pushed further: A > 0 and pi - mu > clip_high, or A < 0 and pi - mu < -clip_low;
    else 1. |pi - mu| is the total variation between the two policies, told apart by this one token only; a ratio would
    overrate rare tokens and underrate likely ones. With clips of 1, never reached, it is plain importance sampling.
    The squared log-ratio, which masked tokens feel too, and the numbers (0.2, 0.2, 1e-3) are prime-rl's.
    Always against the sampler, hence `ratio_reference = "sampler"`. Departure: log-ratios are clamped to plus or minus 20 nats.
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
