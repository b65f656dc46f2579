"""The optimizer steps of one update: gradient after gradient over its mini-batches and epochs.

The numbers of one update, summed over its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.config.schema import LearnerSection
from clotho.models.parameters import Parameters, flat, nested
from clotho.models.policy import TrainablePolicy
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.training.batch import MiniBatch
from clotho.training.gradient import Gradient, LossSettings, Moment, add, micro_gradient
from clotho.training.objectives.loss import LossCoefficients, TokenSums
from clotho.training.optimizers import OptimizerState, apply_step, clip_scale, global_norm
from clotho.training.prepare import PreparedBatch
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

    def metrics(self, *, tokens: int, rate: float, loss_coefficients: LossCoefficients, steps: int) -> UpdateMetrics:
        """All numbers of the update; tokens: learned ones, each counted once; steps: taken, none that stands if 0."""
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
            kl_beta=loss_coefficients.kl_beta,
            entropy_weight=loss_coefficients.entropy_weight,
            optimizer_steps=steps,
            distillation=sums["distilled"] / self._taught if self._taught else 0.0,
        )


class OptimizerProgress(NamedTuple):
    """Where optimizer steps have led.

    steps: those that had a gradient other than zero. gradients: of the last of them, by parameter name; none at first.
    start: log-probabilities of the tokens of each micro-batch of the first mini-batch, at the weights before any step.
    """

    parameters: Parameters
    optimizer: OptimizerState
    steps: int
    gradients: dict[str, mx.array]
    start: tuple[mx.array, ...]


def optimize(
    batch: PreparedBatch,
    start: OptimizerProgress,
    *,
    policy: TrainablePolicy,
    forcing: TeacherForcing,
    rules: LossSettings,
    version: int,
    rate: float,
    tally: Tally,
) -> Generator[None, None, OptimizerProgress | None]:
    """Take a step for every mini-batch of every epoch; None where loss or gradient of one was not finite.

    version: of the weights that the update begins with. tally: adds up what the steps report. A gradient of exactly
    zero is no step: momentum would make one of it. Yields after every micro-batch, served weights in the model.
    """
    moved = start
    count = rules.settings.update_epochs * len(batch.mini_batches)
    for number in range(count):
        index = number % len(batch.mini_batches)
        moment = Moment(version, number / count)
        total: Gradient | None = None
        for micro, known in zip(batch.mini_batches[index].micro_batches, batch.known[index], strict=True):
            part = micro_gradient(policy, forcing, moved.parameters, micro, known, rules=rules, moment=moment)
            total = add(total, part)
            if number == 0:
                moved = moved._replace(start=(*moved.start, part.logp_N))
            yield
        assert total is not None
        norm = float(np.array(global_norm(total.arrays)))
        mini = batch.mini_batches[index]
        taught = sum(micro.table.taught for micro in mini.micro_batches)
        if not tally.add(total.sums, tokens=mini.tokens, fresh=_fresh(mini, moment), taught=taught, norm=norm):
            return None
        if norm > 0.0:
            moved = _step(moved, total, rules.settings, rate=rate, scale=clip_scale(norm, rules.settings.max_grad_norm))
    return moved


def _step(
    moved: OptimizerProgress, total: Gradient, settings: LearnerSection, *, rate: float, scale: float
) -> OptimizerProgress:
    parameters, optimizer = apply_step(
        flat(moved.parameters), total.arrays, moved.optimizer, learning_rate=rate, scale=scale, settings=settings
    )
    mx.eval(parameters, optimizer.slots, optimizer.master)
    return OptimizerProgress(nested(parameters), optimizer, moved.steps + 1, total.arrays, moved.start)


def _fresh(mini: MiniBatch, moment: Moment) -> int:
    """Tokens of a mini-batch that the learner's own weights drew, where it still has them."""
    if moment.progress > 0:
        return 0
    tables = [micro.table for micro in mini.micro_batches]
    return sum(int(((table.version_N == moment.version) * table.weight_N).sum()) for table in tables)
