"""Adaptive coefficients of the KL penalty and the entropy bonus, updated once per update in plain Python."""

from __future__ import annotations

import math

from clotho.settings.bounds import Off
from clotho.settings.learner import (
    AdaptiveCoefficient,
    AdaptiveEntropyBonus,
    FixedEntropyBonus,
    KLPenalty,
    LearnerSection,
)
from clotho.training.objectives.loss import LossCoefficients

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

    A fixed coefficient does not change, and no coefficient changes after a measurement that is not finite.
    """
    return LossCoefficients(
        next_kl_beta(loss_coefficients.kl_beta, kl, settings),
        next_entropy_coef(loss_coefficients.entropy_coef, entropy, settings),
    )


def next_kl_beta(beta: float, kl: float, settings: LearnerSection) -> float:
    """Return the next KL coefficient: the adaptive controller of Ziegler et al. (arXiv:1909.08593), equation 11.

    beta <- beta * (1 + e / horizon), e = clip(kl / target - 1, -0.2, 0.2). The paper has a horizon of 10.
    """
    penalty = settings.kl_penalty
    if (
        not isinstance(penalty, KLPenalty)
        or not isinstance(penalty.control, AdaptiveCoefficient)
        or not math.isfinite(kl)
    ):
        return beta
    error = min(max(kl / penalty.control.target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return beta * (1.0 + error / penalty.control.horizon)


def next_entropy_coef(weight: float, entropy: float, settings: LearnerSection) -> float:
    """Return the next entropy coefficient.

    adaptive: up by `step` while the entropy is below `target`, else down by `step`, never below 0: adaptive entropy
    control, Skywork-OR1 (arXiv:2505.22312), with a departure that docs/numerics.md lists. fixed: coefficient <-
    coefficient * decay.
    """
    bonus = settings.entropy_bonus
    if isinstance(bonus, FixedEntropyBonus):
        return weight * bonus.decay
    if not isinstance(bonus, AdaptiveEntropyBonus) or not math.isfinite(entropy):
        return weight
    return max(0.0, weight + (bonus.step if entropy < bonus.target else -bonus.step))
