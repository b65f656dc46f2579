"""The numbers of one update, summed over its gradients."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from clotho.training.objectives.loss import Strengths, TokenSums
from protocols.step import UpdateMetrics


class Tally:
    """Adds up what the optimizer steps of one update report; `metrics` divides by the tokens they saw."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(TokenSums._fields))
        self._tokens = self._gradients = self._fresh = self._taught = 0
        self._norm = 0.0

    def add(self, sums: mx.array, *, tokens: int, fresh: int, taught: int, norm: float) -> bool:
        """Count one optimizer step's gradient; whether loss and gradient are finite.

        sums: in `TokenSums` order. fresh: tokens among `tokens` whose mismatch was measured; taught: those
        with a teacher.
        """
        added = np.array(sums, dtype=np.float64)
        self._sums += added
        self._tokens, self._fresh, self._gradients = self._tokens + tokens, self._fresh + fresh, self._gradients + 1
        self._taught += taught
        self._norm = norm
        return math.isfinite(norm) and math.isfinite(added[TokenSums._fields.index("loss")])

    def metrics(self, *, tokens: int, rate: float, strengths: Strengths, steps: int) -> UpdateMetrics:
        """All numbers of the update; tokens: learnt ones, each counted once; steps: taken, none that stands if 0."""
        sums = dict(zip(TokenSums._fields, self._sums.tolist(), strict=True))
        seen = max(1, self._tokens)
        square = seen * sums["ratio_squared"]
        return UpdateMetrics(
            loss=sums["loss"] / max(1, self._gradients),
            kl=sums["kl"] / seen,
            entropy=sums["entropy"] / seen,
            clip_fraction=sums["clipped"] / seen,
            mismatch_kl=sums["mismatch"] / self._fresh if self._fresh else 0.0,
            ratio_mean=sums["ratio"] / seen,
            grad_norm=self._norm,
            learning_rate=rate,
            tokens=tokens,
            applied=steps > 0,
            ess=sums["ratio"] ** 2 / square if square > 0 else 1.0,
            rejected_fraction=sums["rejected"] / seen,
            kl_beta=strengths.kl_beta,
            entropy_weight=strengths.entropy_weight,
            optimizer_steps=steps,
            distillation=sums["distilled"] / self._taught if self._taught else 0.0,
        )
