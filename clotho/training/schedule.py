"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from clotho.config.schema import LearnerSection


def constant(progress: float) -> float:
    """Stay at the full rate: 1 for every progress in [0, 1]."""
    return 1.0


def linear(progress: float) -> float:
    """Fall in a straight line: 1 at progress 0, 0 at progress 1."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Fall along half a cosine (SGDR, arXiv:1608.03983, equation 5, without restarts): 1 at progress 0, 0 at 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"constant": constant, "linear": linear, "cosine": cosine}
)
"""`learner.schedule` -> share of the way from the minimum to the full rate, by progress after the warm-up."""


def learning_rate(step: int, *, steps: int, settings: LearnerSection) -> float:
    """Rate of update `step` (from 0) of `steps`.

    Warm-up: rate (step + 1) / warmup_steps. Then from the full rate to the minimum, reached at step = steps - 1 and
    kept beyond. A schedule that has only its last step left after the warm-up takes that step at the full rate.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = steps - 1 - settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / span) if span > 0 else 0.0
    if span <= 0 and step > settings.warmup_steps:
        progress = 1.0
    share = SCHEDULES[settings.schedule](progress)
    return settings.min_learning_rate + (settings.learning_rate - settings.min_learning_rate) * share
