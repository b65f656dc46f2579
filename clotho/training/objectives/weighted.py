"""Objectives that weigh log pi: the policy gradient itself, every token teaching something.

The departures listed in `clipped` hold here too. The value of these losses means little: only their gradient does.
"""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.objectives.contract import PolicyLoss, Tokens
from clotho.training.objectives.kl import bounded_log_ratio


def reinforce(logp_N: mx.array, tokens: Tokens, settings: LearnerSection) -> PolicyLoss:
    """The policy gradient, L_t = -A_t log pi(t): Williams, "Simple statistical gradient-following algorithms" (1992).

    There is no ratio. Samples of another policy are what a correction is for: the recipe brings `anchor = "proximal"`
    and the truncated weight (TIS). Nothing is ever clipped.
    """
    return PolicyLoss(-tokens.advantage_N * logp_N, mx.zeros_like(logp_N))


def cispo(logp_N: mx.array, tokens: Tokens, settings: LearnerSection) -> PolicyLoss:
    """Clipped IS-weight Policy Optimization, MiniMax-M1 (arXiv:2506.13585): bound the weight, not the gain.

    L_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(t). Rare tokens that the update moves far keep their
    gradient, with a bounded weight. The recipe: no lower bound (clip_low = 1), weights of at most 5 (TRL's advice after
    ScaleRL, arXiv:2510.13786; MiniMax names no number), the mean over all tokens. clipped_N is where the weight is
    cut; these tokens teach all the same.
    """
    ratio_N = mx.exp(bounded_log_ratio(mx.stop_gradient(logp_N), tokens.anchor_N))
    weight_N = mx.clip(ratio_N, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return PolicyLoss(-weight_N * tokens.advantage_N * logp_N, weight_N != ratio_N)
