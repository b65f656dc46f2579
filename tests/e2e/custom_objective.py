"""Custom objectives."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx

from clotho.settings.objectives import Custom
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss


def importance_weighted(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Importance sampling without clipping."""
    ratio_N = mx.exp(logp_N - tokens.old_logp_N)
    return PolicyLoss(-ratio_N * tokens.advantage_N, mx.zeros_like(ratio_N))


CALLS = itertools.count(1)
FINITE_CALLS = 2


def nan_after_two_calls(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Importance sampling whose loss becomes NaN after `FINITE_CALLS` calls of the process."""
    found = importance_weighted(logp_N, tokens, settings)
    return found if next(CALLS) <= FINITE_CALLS else found._replace(loss_N=found.loss_N * math.nan)
