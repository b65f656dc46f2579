"""Objectives whose trust region has no edge."""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.objectives.contract import PolicyLoss, Tokens
from clotho.training.objectives.kl import bounded_log_ratio


def sapo(logp_N: mx.array, tokens: Tokens, settings: LearnerSection) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): a sigmoid in the place of the clip.

    L_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau = sapo_positive where A > 0, else sapo_negative. The gradient is
    that of -A r, times 4 p (1 - p) with p = sigmoid(tau (r - 1)): exactly 1 at r = 1, fading on both sides, and faster
    with a larger tau; the paper takes 1.05 for negative advantages, 1 for positive ones. The value at r = 1 is -2 A /
    tau. Nothing is clipped. Departure: log-ratios are clamped to plus or minus 20 nats.
    """
    ratio_N = mx.exp(bounded_log_ratio(logp_N, tokens.anchor_N))
    tau_N = mx.where(tokens.advantage_N > 0, settings.sapo_positive, settings.sapo_negative)
    gate_N = 4.0 / tau_N * mx.sigmoid(tau_N * (ratio_N - 1.0))
    return PolicyLoss(-gate_N * tokens.advantage_N, mx.zeros_like(logp_N))
