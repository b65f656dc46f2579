"""Learning-rate schedules: the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from clotho.config.sections_training import ConstantSchedule, CosineSchedule, LearnerSection, LinearSchedule, Schedule


def constant(progress: float) -> float:
    """Return 1 for every progress in [0, 1]."""
    return 1.0


def linear(progress: float) -> float:
    """Return 1 - progress."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """Return half a cosine from 1 to 0: SGDR (arXiv:1608.03983), equation 5, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Mapping[type[Schedule], Callable[[float], float]] = MappingProxyType(
    {ConstantSchedule: constant, LinearSchedule: linear, CosineSchedule: cosine}
)
"""`learner.schedule` -> decay(progress): 1 at progress 0 is the full rate, 0 is the minimum."""


def learning_rate(step: int, *, steps: int, settings: LearnerSection) -> float:
    """Return the learning rate of update `step` (from 0) of `steps`; positive for each of these updates.

    Warmup: rate * (step + 1) / warmup_steps. Then decay with progress (step - warmup_steps) / (steps - warmup_steps),
    as in Transformers' `get_cosine_schedule_with_warmup`: the first update after the warmup has the full rate, and the
    minimum is reached one step after the last update. Beyond `steps` (a run resumed with fewer steps) it stays there.
    """
    schedule, highest = settings.schedule, settings.optimizer.learning_rate
    lowest = 0.0 if isinstance(schedule, ConstantSchedule) else schedule.min_learning_rate
    warmup = schedule.warmup_steps
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup) if step < steps else 1.0
    return lowest + (highest - lowest) * SCHEDULES[type(schedule)](progress)
