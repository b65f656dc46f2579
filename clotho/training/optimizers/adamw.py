"""AdamW, arXiv:1711.05101, algorithm 2, with bias correction; the decay is `table.advance`'s."""

from __future__ import annotations

import math

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.rule import Arrays


def slots(parameter: mx.array) -> Arrays:
    """Moving averages of the gradient (`first`) and of its square (`second`); zero."""
    return {name: mx.zeros(parameter.shape, dtype=mx.float32) for name in ("first", "second")}


def constants(t: int, settings: LearnerSection) -> dict[str, float]:
    """The bias corrections of both averages."""
    return {"mean": 1.0 / seen(settings.beta1, t), "deviation": 1.0 / math.sqrt(seen(settings.beta2, t))}


def rule(
    theta: mx.array, gradient: mx.array, slots: Arrays, constants: Arrays, rate: mx.array, settings: LearnerSection
) -> tuple[mx.array, Arrays]:
    """Adam (arXiv:1412.6980, algorithm 1).

    m <- beta1 m + (1 - beta1) g          m^ = m / (1 - beta1^t)
    v <- beta2 v + (1 - beta2) g^2        v^ = v / (1 - beta2^t)
    theta <- theta - rate m^ / (sqrt v^ + epsilon)
    """
    first = settings.beta1 * slots["first"] + (1.0 - settings.beta1) * gradient
    second = settings.beta2 * slots["second"] + (1.0 - settings.beta2) * mx.square(gradient)
    root = mx.sqrt(second) * constants["deviation"] + settings.epsilon
    return theta - (rate * constants["mean"]) * (first / root), {"first": first, "second": second}


def seen(beta: float, t: int) -> float:
    """Weight that a moving average started from zero has given to what it saw in `t` steps: 1 - beta^t."""
    return -math.expm1(t * math.log(beta)) if beta else 1.0
