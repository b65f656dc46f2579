"""Weights of KL penalty and entropy bonus that follow what they are to control; plain Python, once per update."""

from __future__ import annotations

import math

from clotho.config.schema import LearnerSection
from clotho.config.sections_training import (
    AdaptiveCoefficient,
    AdaptiveEntropyBonus,
    FixedEntropyBonus,
    KLPenalty,
    NoEntropyBonus,
)
from clotho.training.objectives.loss import LossCoefficients

LARGEST_ERROR = 0.2
"""Beyond this relative distance from the target, the KL coefficient does not move faster."""


def initial_loss_coefficients(settings: LearnerSection) -> LossCoefficients:
    """Weights of the first update: those of the profile."""
    penalty, bonus = settings.kl_penalty, settings.entropy_bonus
    return LossCoefficients(
        penalty.coef if isinstance(penalty, KLPenalty) else 0.0,
        0.0 if isinstance(bonus, NoEntropyBonus) else bonus.coef,
    )


def next_loss_coefficients(
    loss_coefficients: LossCoefficients, *, kl: float, entropy: float, settings: LearnerSection
) -> LossCoefficients:
    """Weights of the next update, after one that measured `kl` and `entropy`, nats per token.

    What is fixed in the profile stays bit for bit; so does what was measured as not finite.
    """
    return LossCoefficients(
        next_kl_beta(loss_coefficients.kl_beta, kl, settings),
        next_entropy_weight(loss_coefficients.entropy_weight, entropy, settings),
    )


def next_kl_beta(beta: float, kl: float, settings: LearnerSection) -> float:
    """Move the KL coefficient in proportion to the error: Ziegler et al. (arXiv:1909.08593).

    beta <- beta (1 + e / kl_horizon), e = clip(kl / kl_target - 1, -0.2, 0.2). The paper: horizon 10.
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


def next_entropy_weight(weight: float, entropy: float, settings: LearnerSection) -> float:
    """Move the entropy bonus by `entropy_step` towards its target, or let it decay where there is none.

    With `entropy_target`: up while the entropy is below it, else down, never below 0; adaptive entropy control,
    Skywork-OR1 (arXiv:2505.22312). Departure: the bonus stays on while it is being lowered; the paper switches it off
    above the target. Without: weight <- weight entropy_decay.
    """
    bonus = settings.entropy_bonus
    if isinstance(bonus, FixedEntropyBonus):
        return weight * bonus.decay
    if not isinstance(bonus, AdaptiveEntropyBonus) or not math.isfinite(entropy):
        return weight
    return max(0.0, weight + (bonus.step if entropy < bonus.target else -bonus.step))
