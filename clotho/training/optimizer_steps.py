"""The optimizer steps of one update: one gradient and one step for every minibatch of every epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from msgspec.structs import fields
from numpy.typing import ArrayLike, NDArray

from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.settings.learner import EssStepScale, LearnerSection
from clotho.training.batch import Minibatch, TrainingBatch
from clotho.training.gradient import LearnerModel, LossConfig, MicroBatchGradient, StepPosition
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizers import PLAIN, OptimizerState, StepRule, clip_scale, global_norm
from protocols.rollout import ScoredGroup
from protocols.step import TokenValues, UpdateMetrics

UNMEASURED: dict[str, Any] = {field.name: 0.0 for field in fields(UpdateMetrics) if field.required} | {
    "ratio_mean": 1.0
}
"""The metrics of an update without a token, or with a loss that does not measure them."""


MAX_CROSS_ENTROPY = 700.0
"""Bound in nats: the exponential function of more overflows."""


def metric_means(sums: Mapping[str, ArrayLike]) -> dict[str, float]:
    """Return the mean of each metric from its sum over tokens and their number, (2,); 0 without a token.

    The tokens of experts become the shares of the most and least used expert, and the fraction of unused experts; the
    cross-entropy of demonstrations becomes their perplexity.
    """
    pairs = {name: np.array(pair, dtype=np.float64) for name, pair in sums.items()}
    load = pairs.pop("expert_load", None)
    means = {name: float(total / count) if count else 0.0 for name, (total, count) in pairs.items()}
    if (cross_entropy := means.pop("cross_entropy", None)) is not None:
        means["perplexity"] = math.exp(min(cross_entropy, MAX_CROSS_ENTROPY))
    return means if load is None else means | _expert_metrics(load)


def _expert_metrics(load: NDArray[np.float64]) -> dict[str, float]:
    """Return the metrics of experts from the tokens of each expert of all layers, followed by the number of tokens."""
    share = load[:-1] / max(load[-1], 1.0)
    return {
        "expert_share_max": float(share.max()),
        "expert_share_min": float(share.min()),
        "unused_experts_fraction": float((share == 0).mean()),
    }


class MetricTotals:
    """Adds up the losses and metrics of the optimizer steps of one update."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._sums: dict[str, np.ndarray] = {}
        self._norm = 0.0
        self._sample_sizes: list[float] = []
        self._scales: list[float] = []

    def add(self, gradient: MicroBatchGradient, *, norm: float, sample_size: float, scale: float) -> bool:
        """Add the gradient, sample size and rate factor of a step; return whether loss, norm and factor are finite."""
        self._losses.append(float(gradient.loss))
        for name, sums in gradient.metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + np.array(sums, dtype=np.float64)
        self._norm = norm
        self._sample_sizes.append(sample_size)
        self._scales.append(scale)
        return math.isfinite(norm) and math.isfinite(self._losses[-1]) and math.isfinite(scale)

    def metrics(
        self, *, tokens: int, learning_rate: float, loss_coefficients: LossCoefficients, steps: int
    ) -> UpdateMetrics:
        """Return the metrics of the update. tokens: each counted once. steps: that were taken; 0 if rejected."""
        means = UNMEASURED | metric_means(self._sums)
        ratio_squared = means.pop("ratio_squared_mean", 0.0)
        means |= {
            "loss": sum(self._losses) / max(1, len(self._losses)),
            "ess": means["ratio_mean"] ** 2 / ratio_squared if ratio_squared > 0 else 1.0,
            "grad_norm": self._norm,
            "learning_rate": learning_rate,
            "trained_tokens": tokens,
            "update_applied": steps > 0,
            "optimizer_steps": steps,
            "kl_beta": loss_coefficients.kl_beta,
            "entropy_coef": loss_coefficients.entropy_coef,
            "completion_ess": fmean(self._sample_sizes or [1.0]),
            "step_scale": fmean(self._scales or [1.0]),
        }
        return UpdateMetrics(**means)


def effective_sample_size(log_weight_M: NDArray[np.float64]) -> float:
    """Return (sum w)^2 / (M sum w^2) of M importance weights, as a fraction of M: Kish's effective sample size.

    1 for equal weights, 1 / M if one weight is much larger than all others, 1 without weights. log_weight_M: log w; the
    largest is subtracted, so that no weight overflows. NaN if a log w is NaN or infinite.
    """
    if not log_weight_M.size:
        return 1.0
    with np.errstate(invalid="ignore"):
        weight_M = np.exp(log_weight_M - log_weight_M.max())
    return float(weight_M.sum() ** 2 / (weight_M.size * np.square(weight_M).sum()))


def step_scale(sample_size: float, settings: LearnerSection) -> float:
    """Return min(1, ESS / base)^exponent, the factor of the learning rate: VCPO (arXiv:2602.17616).

    sample_size: effective sample size of the importance weights of whole completions, as a fraction of the completions.
    With exponent 1/2, the learning rate of an adaptive optimizer changes with the effective number of completions as
    the square-root rule asks for the batch size. 1 if `learner.step_scale` is "off"; NaN for NaN.
    """
    chosen = settings.step_scale
    return min(sample_size / chosen.base, 1.0) ** chosen.exponent if isinstance(chosen, EssStepScale) else 1.0


class TokenRecorder(Protocol):
    """Collects the values of every token from the first gradient of an update that uses the token."""

    def add(self, mini: Minibatch, parts: Sequence[MicroBatchGradient]) -> None:
        """Add the tokens of a minibatch. parts: the gradients of its micro-batches, with `tokens`."""

    def values(self, groups: Sequence[ScoredGroup], batch: TrainingBatch) -> tuple[tuple[TokenValues, ...], ...]:
        """Return the values of each completion of the first groups of the update."""


class OptimizerProgress(NamedTuple):
    """Result of the optimizer steps taken so far.

    steps: number of steps. gradients: gradient of the last step, by parameter name;
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
    model: LearnerModel,
    *,
    loss_config: LossConfig,
    version: int,
    learning_rate: float,
    totals: MetricTotals,
    record: TokenRecorder | None = None,
    rule: StepRule = PLAIN,
    step: int = 0,
) -> OptimizerProgress | None:
    """Take one step for every minibatch of every epoch; return None if a loss or gradient is not finite.

    version: policy version of the weights before the first step. totals: receives the metrics. record: receives the
    tokens. rule, step: see `take_step`. Other ranks compute a share of every gradient; every step is taken here. A
    gradient of exactly zero takes no step, because momentum and weight decay would move the weights. The importance
    weights that scale the learning rate are those of the gradient, so they need no other forward pass.
    """
    progress, settings = start, loss_config.settings
    count = settings.update_epochs * len(batch.minibatches)
    for number in range(count):
        index = number % len(batch.minibatches)
        mini, recorder = batch.minibatches[index], record if number == index else None
        total, parts = model.minibatch_gradient(
            progress.parameters,
            mini.micro_batches,
            batch.fixed_logprobs[index],
            loss_config=loss_config,
            position=StepPosition(version, number / count),
            token_gradients=recorder is not None,
        )
        if recorder is not None:
            recorder.add(mini, parts)
        if number == 0:
            progress = progress._replace(initial_logp=tuple(part.logp_N for part in parts))
        log_weights = completion_weights(mini, parts, settings)
        stepped = take_step(
            progress,
            total,
            log_weights,
            settings=settings,
            learning_rate=learning_rate,
            totals=totals,
            rule=rule,
            step=step,
        )
        if stepped is None:
            return None
        model.turns.pause()
        progress = stepped
    return progress


def completion_weights(
    mini: Minibatch, parts: Sequence[MicroBatchGradient], settings: LearnerSection
) -> list[NDArray[np.float64]]:
    """Return log importance weights of completions by micro-batch, (B,) nats; 0 without a sampler."""
    if not settings.objective.has_ratio:
        return [np.zeros(micro.sequences) for micro in mini.micro_batches]
    logps = (np.array(part.logp_N, dtype=np.float64) for part in parts)
    return [micro.log_weight_B(logp_N) for micro, logp_N in zip(mini.micro_batches, logps, strict=True)]


def take_step(
    progress: OptimizerProgress,
    total: MicroBatchGradient,
    log_weights: Sequence[NDArray[np.float64]],
    *,
    settings: LearnerSection,
    learning_rate: float,
    totals: MetricTotals,
    rule: StepRule = PLAIN,
    step: int = 0,
    steps_at_zero: bool = False,
) -> OptimizerProgress | None:
    """Take one step along a gradient; return None if loss or gradient is not finite.

    log_weights: per micro-batch, the logarithms of the importance weights of its completions. totals: as above. rule:
    of the step. step: number of updates before this one. steps_at_zero: also along a gradient that is exactly zero, so
    that momentum and weight decay move the weights.
    """
    gradients = rule.gradient(total.arrays, progress.optimizer)
    norm = float(np.array(global_norm(gradients)))
    sample_size = effective_sample_size(np.concatenate(log_weights))
    scale = step_scale(sample_size, settings)
    if not totals.add(total, norm=norm, sample_size=sample_size, scale=scale):
        return None
    if norm == 0.0 and not steps_at_zero:
        return progress
    parameters, optimizer = rule.apply(
        flat(progress.parameters),
        gradients,
        progress.optimizer,
        step=step,
        learning_rate=scale * learning_rate,
        scale=clip_scale(norm, settings.max_grad_norm),
        settings=settings,
    )
    mx.eval(parameters, optimizer.slots, optimizer.master)
    return progress._replace(
        parameters=nested(parameters), optimizer=optimizer, steps=progress.steps + 1, gradients=total.arrays
    )
