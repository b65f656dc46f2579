"""Size of a gradient, and the factor that bounds it."""

from __future__ import annotations

import mlx.core as mx

from clotho.training.optimizers.rule import Arrays


def global_norm(gradients: Arrays) -> mx.array:
    """Euclidean norm of all gradients as one vector: float32 scalar; not finite if any of them is not.

    Finite gradients whose squares overflow (beyond about 1e19) count as not finite.
    """
    return mx.sqrt(sum((mx.sum(mx.square(g.astype(mx.float32))) for g in gradients.values()), mx.array(0.0)))


def clip_scale(norm: float, max_norm: float) -> float:
    """Factor that brings a gradient of this norm down to `max_norm`; 1 if it is within, or if `max_norm` is 0."""
    return max_norm / norm if 0.0 < max_norm < norm else 1.0
