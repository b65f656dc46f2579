"""Lion, arXiv:2302.06675, algorithm 2; the decay is `table.advance`'s."""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.rule import Arrays


def slots(parameter: mx.array) -> Arrays:
    """Moving average of the gradient; zero."""
    return {"average": mx.zeros(parameter.shape, dtype=mx.float32)}


def constants(t: int, settings: LearnerSection) -> dict[str, float]:
    """None: every step is like the first."""
    return {}


def rule(
    theta: mx.array, gradient: mx.array, slots: Arrays, constants: Arrays, rate: mx.array, settings: LearnerSection
) -> tuple[mx.array, Arrays]:
    """Every element moves by the rate, or not at all where its gradients have all been zero.

    theta <- theta - rate sign(beta1 m + (1 - beta1) g)
    m <- beta2 m + (1 - beta2) g
    The paper takes rates 3 to 10 times smaller than AdamW's (section 5).
    """
    average = slots["average"]
    direction = mx.sign(settings.beta1 * average + (1.0 - settings.beta1) * gradient)
    return theta - rate * direction, {"average": settings.beta2 * average + (1.0 - settings.beta2) * gradient}
