"""The optimizer steps of one update: one gradient and one step for every minibatch of every epoch."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from clotho.config.sections_training import LearnerSection
from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.models.policy import TrainablePolicy
from clotho.models.turns import TurnBudget
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.training.batch import TrainingBatch
from clotho.training.gradient import Gradient, LossConfig, StepPosition, add_gradients, micro_batch_gradient
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import OptimizerState, apply_step, clip_scale, global_norm
from protocols.step import UpdateMetrics


class MetricTotals:
    """Adds up the losses and metrics of the optimizer steps of one update."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._sums: dict[str, np.ndarray] = {}
        self._norm = 0.0

    def add(self, gradient: Gradient, *, norm: float) -> bool:
        """Add the gradient of one optimizer step. Return whether its loss and its norm are finite."""
        self._losses.append(float(gradient.loss))
        for name, sums in gradient.metrics.items():
            self._sums[name] = self._sums.get(name, np.zeros(2)) + np.array(sums, dtype=np.float64)
        self._norm = norm
        return math.isfinite(norm) and math.isfinite(self._losses[-1])

    def metrics(
        self, *, tokens: int, learning_rate: float, loss_coefficients: LossCoefficients, steps: int
    ) -> UpdateMetrics:
        """Return the metrics of the update.

        tokens: number of tokens trained on, each counted once. steps: number of steps taken; 0 if the update is
        rejected.
        """
        means = {name: float(total / count) if count else 0.0 for name, (total, count) in self._sums.items()}
        ratio_squared = means.pop("ratio_squared_mean", 0.0)
        return UpdateMetrics(
            **means,
            loss=sum(self._losses) / max(1, len(self._losses)),
            ess=means["ratio_mean"] ** 2 / ratio_squared if ratio_squared > 0 else 1.0,
            grad_norm=self._norm,
            learning_rate=learning_rate,
            trained_tokens=tokens,
            update_applied=steps > 0,
            optimizer_steps=steps,
            kl_beta=loss_coefficients.kl_beta,
            entropy_coef=loss_coefficients.entropy_coef,
        )


class OptimizerProgress(NamedTuple):
    """Result of the optimizer steps taken so far.

    steps: number of steps with a gradient other than zero. gradients: gradient of the last step, by parameter name;
    None at first. initial_logp: per micro-batch of the first minibatch, log-probabilities of its tokens (N,) at the
    weights before any step.
    """

    parameters: Parameters
    optimizer: OptimizerState
    steps: int = 0
    gradients: Arrays | None = None
    initial_logp: tuple[mx.array, ...] = ()


def take_optimizer_steps(
    batch: TrainingBatch,
    start: OptimizerProgress,
    *,
    policy: TrainablePolicy,
    forcing: TeacherForcing,
    loss_config: LossConfig,
    version: int,
    learning_rate: float,
    totals: MetricTotals,
    turns: TurnBudget,
) -> Generator[None, None, OptimizerProgress | None]:
    """Take one step for every minibatch of every epoch; return None if a loss or gradient is not finite.

    version: policy version of the weights before the first step. totals: receives the metrics. A gradient of exactly
    zero takes no step, because momentum and weight decay would move the weights. Yields after every micro-batch and
    step, with the served weights in the model.
    """
    progress = start
    count = loss_config.settings.update_epochs * len(batch.minibatches)
    for number in range(count):
        index = number % len(batch.minibatches)
        position = StepPosition(version, number / count)
        total: Gradient | None = None
        for micro, fixed_logprobs in zip(
            batch.minibatches[index].micro_batches, batch.fixed_logprobs[index], strict=True
        ):
            part = yield from micro_batch_gradient(
                policy,
                forcing,
                progress.parameters,
                micro,
                fixed_logprobs,
                loss_config=loss_config,
                position=position,
                turns=turns,
            )
            total = add_gradients(total, part)
            if number == 0:
                progress = progress._replace(initial_logp=(*progress.initial_logp, part.logp_N))
            yield from turns.pause()
        assert total is not None
        norm = float(np.array(global_norm(total.arrays)))
        if not totals.add(total, norm=norm):
            return None
        if norm > 0.0:
            scale = clip_scale(norm, loss_config.settings.max_grad_norm)
            progress = _step(progress, total.arrays, loss_config.settings, learning_rate=learning_rate, scale=scale)
            yield from turns.pause()
    return progress


def _step(
    progress: OptimizerProgress, gradients: Arrays, settings: LearnerSection, *, learning_rate: float, scale: float
) -> OptimizerProgress:
    parameters, optimizer = apply_step(
        flat(progress.parameters),
        gradients,
        progress.optimizer,
        learning_rate=learning_rate,
        scale=scale,
        settings=settings,
    )
    mx.eval(parameters, optimizer.slots, optimizer.master)
    return progress._replace(
        parameters=nested(parameters), optimizer=optimizer, steps=progress.steps + 1, gradients=gradients
    )
