"""Adafactor, arXiv:1804.04235, algorithms 4 and 5, without relative steps; the decay is `table.advance`'s.

Departure from the paper: the rate is the schedule's, neither taken from the step's number nor multiplied by the size
of the parameter (its section 8); so an element moves by about the rate, as with AdamW.
"""

from __future__ import annotations

import mlx.core as mx

from clotho.config.schema import LearnerSection
from clotho.training.optimizers.rule import Arrays

EPSILON = 1e-30
"""Added to every squared gradient (epsilon_1)."""

DECAY = 0.8
"""The second moment forgets by 1 - t^-0.8 (section 7)."""

CLIP = 1.0
"""Largest root mean square of an update, before the rate (d, section 6)."""


def slots(parameter: mx.array) -> Arrays:
    """Averages of the squared gradient: of a matrix (R, C) over `row` (R,) and `column` (C,), else `second` in full.

    Of an array of more axes, such as stacked experts, every matrix of the last two has its own.
    """
    if parameter.ndim < 2:
        return {"second": mx.zeros(parameter.shape, dtype=mx.float32)}
    *stack, rows, columns = parameter.shape
    return {
        "row": mx.zeros((*stack, rows), dtype=mx.float32),
        "column": mx.zeros((*stack, columns), dtype=mx.float32),
    }


def constants(t: int, settings: LearnerSection) -> dict[str, float]:
    """The share of what is new in both averages, 1 - beta."""
    return {"new": t**-DECAY}


def rule(
    theta: mx.array, gradient: mx.array, slots: Arrays, constants: Arrays, rate: mx.array, settings: LearnerSection
) -> tuple[mx.array, Arrays]:
    """Divide the gradient by the root of its second moment, which for a matrix is of rank one; clip; step.

    beta = 1 - t^-0.8;  S = g^2 + epsilon_1
    R <- beta R + (1 - beta) mean_rows(S);  C <- beta C + (1 - beta) mean_columns(S);  V = R C^T / mean(R)
    U = g / sqrt V;  theta <- theta - rate U / max(1, RMS(U) / d)
    No momentum. Means in place of the paper's sums, which cancels in V.
    """
    fresh = constants["new"]
    kept = 1.0 - fresh
    squared = mx.square(gradient) + EPSILON

    def averaged(name: str, new: mx.array) -> mx.array:
        return kept * slots[name] + fresh * new

    if "second" in slots:
        second = averaged("second", squared)
        return theta - rate * _clipped(gradient * mx.rsqrt(second)), {"second": second}
    row = averaged("row", mx.mean(squared, axis=-1))
    column = averaged("column", mx.mean(squared, axis=-2))
    row_factor = mx.sqrt(mx.mean(row, axis=-1, keepdims=True)) * mx.rsqrt(row)
    update = gradient * mx.rsqrt(column)[..., None, :] * row_factor[..., None]  # in this order nothing overflows
    return theta - rate * _clipped(update), {"row": row, "column": column}


def _clipped(update: mx.array) -> mx.array:
    """Shorten each vector or matrix whose root mean square is beyond `CLIP`."""
    axes = (-2, -1) if update.ndim > 1 else None
    size = mx.sqrt(mx.mean(mx.square(update), axis=axes, keepdims=True))
    return update / mx.maximum(1.0, size / CLIP)
