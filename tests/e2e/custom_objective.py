"""A custom objective."""

from __future__ import annotations

import mlx.core as mx

from clotho.config.objectives import Custom
from clotho.training.objectives.contract import ObjectiveInputs, PolicyLoss


def importance_weighted(logp_N: mx.array, tokens: ObjectiveInputs, settings: Custom) -> PolicyLoss:
    """Importance sampling without clipping."""
    ratio_N = mx.exp(logp_N - tokens.old_logp_N)
    return PolicyLoss(-ratio_N * tokens.advantage_N, mx.zeros_like(ratio_N))
