"""Stochastic gradient descent with momentum (Polyak 1964), undamped; the decay is `table.advance`'s."""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.rule import Arrays


def slots(parameter: mx.array) -> Arrays:
    """Decaying sum of the gradients; zero."""
    return {"velocity": mx.zeros(parameter.shape, dtype=mx.float32)}


def constants(t: int, settings: LearnerSection) -> dict[str, float]:
    """None: every step is like the first."""
    return {}


def rule(
    theta: mx.array, gradient: mx.array, slots: Arrays, constants: Arrays, rate: mx.array, settings: LearnerSection
) -> tuple[mx.array, Arrays]:
    """v <- momentum v + g;  theta <- theta - rate v.  The sum that PyTorch takes, not an average."""
    velocity = settings.momentum * slots["velocity"] + gradient
    return theta - rate * velocity, {"velocity": velocity}
