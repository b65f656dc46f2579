"""Objectives with which nothing can be learned."""

from __future__ import annotations

import mlx.core as mx

from clotho.settings.learner import LearnerSection
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss


def averaged(logp_N: mx.array, tokens: ObjectiveInputs, settings: LearnerSection) -> PolicyLoss:
    """One loss for all tokens."""
    return PolicyLoss(-mx.mean(logp_N * tokens.advantage_N), mx.zeros_like(logp_N))


def failing(logp_N: mx.array, tokens: ObjectiveInputs, settings: LearnerSection) -> PolicyLoss:
    """What is not there cannot be looked up."""
    raise KeyError("temperature")
