"""Objectives that stop where the policy has moved too far, by a divergence rather than by the ratio."""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.objectives.contract import PolicyLoss, Tokens
from clotho.training.objectives.kl import bounded_log_ratio


def dppo_tv(logp_N: mx.array, tokens: Tokens, settings: LearnerSection) -> PolicyLoss:
    """Divergence PPO (arXiv:2602.04879) with the binary total variation: the trust region is in probabilities.

    L_t = -k_t A_t r_t + quadratic_kl (log r_t)^2, r_t = pi(t) / mu(t), mu the sampler. k_t = 0 where the token has
    moved far already, and would be pushed further: A > 0 and pi - mu > clip_high, or A < 0 and pi - mu < -clip_low;
    else 1. |pi - mu| is the total variation between the two policies, told apart by this one token only; a ratio would
    overrate rare tokens and underrate likely ones. With clips of 1, never reached, it is plain importance sampling.
    The squared log-ratio, which masked tokens feel too, and the numbers (0.2, 0.2, 1e-3) are prime-rl's.
    Always against the sampler, hence `anchor = "sampler"`. Departure: log-ratios are clamped to plus or minus 20 nats.
    """
    log_ratio_N = bounded_log_ratio(logp_N, tokens.behaviour_N)
    moved_N = mx.stop_gradient(mx.exp(logp_N) - mx.exp(tokens.behaviour_N))
    rose_N = (tokens.advantage_N > 0) & (moved_N > settings.clip_high)
    fell_N = (tokens.advantage_N < 0) & (moved_N < -settings.clip_low)
    masked_N = rose_N | fell_N
    gain_N = mx.where(masked_N, 0.0, tokens.advantage_N * mx.exp(log_ratio_N))
    return PolicyLoss(settings.quadratic_kl * mx.square(log_ratio_N) - gain_N, masked_N)
