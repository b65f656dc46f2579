"""Loss and gradient of one micro-batch, evaluated in turns of bounded length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.models.policy_model import WeightedModel
from clotho.models.stages import Stage, block_of
from clotho.models.turns import TurnBudget
from clotho.scoring.sequences import MicroBatch
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.bounds import Off
from clotho.settings.learner import LearnerSection
from clotho.settings.objectives import RatioObjective, Reinforce
from clotho.training.objectives.contract import Objective, ObjectiveInputs, PolicyLoss
from clotho.training.objectives.importance_correction import interpolated_proximal
from clotho.training.objectives.loss import LossCoefficients, MetricSums, TokenLossInputs, policy_loss
from clotho.training.optimizers import global_norm


class LossConfig(NamedTuple):
    """What determines the loss and does not change during an update.

    objective: the objective function. distribution: sampling distribution of the tokens. loss_coefficients: current
    coefficients of the KL penalty and the entropy bonus.
    """

    settings: LearnerSection
    objective: Objective
    distribution: SamplingDistribution
    loss_coefficients: LossCoefficients


class FixedLogprobs(NamedTuple):
    """Log-probabilities of a micro-batch's tokens under fixed policies, (N,) float32; None if not needed.

    reference_N: under the reference policy. proximal_N: under the policy at the start of the batch; the first optimizer
    step takes those of its own pass, so that the rounding of another one is in no ratio. reference_point: that of the
    update (`ObjectiveInputs`).
    """

    reference_N: mx.array | None
    proximal_N: mx.array | None
    reference_point: float = 0.0


class StepPosition(NamedTuple):
    """Position of a gradient in an update.

    version: policy version at the start of the update. progress: optimizer steps taken, as a fraction of all steps.
    """

    version: int
    progress: float


class TokenGradient(NamedTuple):
    """The gradient of the loss at each token of a micro-batch: (N,).

    slope_N: d loss / d logp, float32: the derivative of the whole loss with respect to the log-probability of the
    sampled token, that is, of the objective with its correction and of a KL penalty in the loss. Entropy bonus and
    distillation depend on the whole distribution, not on this number, and are not in it. cut_N: what limits the
    gradient, a value of `Cut`.
    """

    slope_N: mx.array
    cut_N: mx.array


class MicroBatchGradient(NamedTuple):
    """Gradient of a micro-batch's loss by parameter name, with the loss and the metrics; evaluated.

    logp_N: log-probabilities of the tokens under the weights of the gradient. tokens: empty unless requested.
    """

    arrays: dict[str, mx.array]
    loss: mx.array
    metrics: MetricSums
    logp_N: mx.array
    tokens: tuple[TokenGradient, ...] = ()


class OtherRanks(Protocol):
    """The other ranks of a data-parallel learner. Each computes a share of the micro-batches of a minibatch.

    pieces: the smallest number of micro-batches of a minibatch that can be divided. The methods are called in pairs, in
    the learner's thread. turns: left while other ranks compute.
    """

    pieces: int

    def assign_gradients(
        self,
        micro_batches: Sequence[MicroBatch],
        fixed_logprobs: Sequence[FixedLogprobs],
        parameters: Parameters,
        *,
        loss_config: LossConfig,
        position: StepPosition,
        token_gradients: bool,
    ) -> Sequence[int]:
        """Send the other ranks their shares, and return the indices of the own share, which is not empty."""

    def add_gradients(
        self, own: MicroBatchGradient, turns: TurnBudget
    ) -> tuple[MicroBatchGradient, dict[int, MicroBatchGradient]]:
        """Return the sum over all shares, and the gradients of the others' micro-batches by index, without arrays.

        own: the sum over the own share.
        """

    def assign_logprobs(
        self, micro_batches: Sequence[MicroBatch], parameters: Parameters | None, reference: Arrays
    ) -> Sequence[int]:
        """Send the other ranks their shares of a forward pass, and return the indices of the own share.

        parameters: None for the reference policy, whose arrays are `reference`.
        """

    def collect_logprobs(self, turns: TurnBudget) -> dict[int, mx.array]:
        """Return the log-probabilities of the others' micro-batches by index."""


def micro_batch_gradient(
    policy: WeightedModel,
    forcing: TeacherForcing,
    parameters: Parameters,
    micro: MicroBatch,
    fixed_logprobs: FixedLogprobs,
    *,
    loss_config: LossConfig,
    position: StepPosition,
    turns: TurnBudget,
    token_gradients: bool = False,
) -> MicroBatchGradient:
    """Return the gradient of one micro-batch's loss with respect to `parameters`. Gradients of micro-batches add up.

    Gradients are float32. Only trainable parameters are differentiated. Afterwards the model has `parameters`, no
    tracer and no changed mode. Tokens count as on-policy while the weights are those of the start of the update.
    token_gradients: also return the gradient at each token, which the backward pass contains already.
    """
    gradient, stages = _gradient_graph(
        policy,
        forcing,
        parameters,
        micro,
        fixed_logprobs,
        loss_config=loss_config,
        position=position,
        turns=turns,
        token_gradients=token_gradients,
    )
    turns.evaluate(stages, _in_order_of_blocks(gradient))
    return gradient


def _gradient_graph(
    policy: WeightedModel,
    forcing: TeacherForcing,
    parameters: Parameters,
    micro: MicroBatch,
    fixed_logprobs: FixedLogprobs,
    *,
    loss_config: LossConfig,
    position: StepPosition,
    turns: TurnBudget,
    token_gradients: bool,
) -> tuple[MicroBatchGradient, list[Stage]]:
    """Build the graph of the gradient, and return its stages."""
    inputs = _inputs(micro, fixed_logprobs, position)
    logp_only = loss_config.loss_coefficients.entropy_coef == 0.0 and micro.table.teacher is None
    chosen = loss_config.settings.objective
    between = (
        isinstance(chosen, RatioObjective)
        and chosen.ratio_reference == "batch_start_interpolated"
        and position.progress > 0
    )

    slopes: list[mx.array] = []

    def loss(traced: Parameters) -> tuple[mx.array, MetricSums, mx.array, mx.array]:
        """Return the loss under traced parameters, with metrics and log-probabilities."""
        policy.use(traced)
        scores, of_experts = forcing.with_experts(micro, distribution=loss_config.distribution, logp_only=logp_only)
        seen = inputs
        if between:
            proximal_N = interpolated_proximal(
                mx.stop_gradient(scores.logp_N),
                inputs.rollout_logp_N,
                mx.array(micro.table.version_N),
                version_proximal=position.version,
                version_current=position.version + position.progress,
            )
            seen = inputs._replace(proximal_N=proximal_N)
        value, metrics, cut_N = policy_loss(
            _watched(scores.logp_N, slopes) if token_gradients else scores.logp_N,
            scores.entropy_N,
            seen,
            cross_entropy_N=scores.cross_entropy_N,
            settings=loss_config.settings,
            loss_coefficients=loss_config.loss_coefficients,
            objective=loss_config.objective,
        )
        return value, metrics | of_experts, mx.stop_gradient(scores.logp_N), cut_N

    # While it traces, MLX puts its tracers into the very containers it is given; others read the learner's.
    own = nested(flat(parameters))
    try:
        with policy.training_mode(), turns.recorded(policy.model, gradients=True) as stages:
            (value, metrics, logp_N, cut_N), tree = mx.value_and_grad(loss)(own)
    finally:
        policy.use(parameters)
    arrays = {name: array.astype(mx.float32) for name, array in flat(tree).items()}
    slope_N = slopes[0] if slopes else mx.zeros_like(logp_N)  # a custom loss may not depend on log-probabilities
    tokens = (TokenGradient(slope_N, cut_N),) if token_gradients else ()
    return MicroBatchGradient(arrays, value, metrics, logp_N, tokens), stages.take(arrays)


def score_norm_squared(
    policy: WeightedModel,
    forcing: TeacherForcing,
    parameters: Parameters,
    micro: MicroBatch,
    *,
    loss_config: LossConfig,
    turns: TurnBudget,
) -> float:
    """Return |grad sum_t log pi_t|^2 over the tokens of a micro-batch, with respect to the trainable parameters."""
    plain = replace(loss_config.settings, objective=Reinforce(importance_correction=Off()), kl_penalty=Off())
    table = micro.table._replace(loss_weight_N=micro.table.loss_mask_N, teacher=None, teacher_logp_N=None)
    gradient = micro_batch_gradient(
        policy,
        forcing,
        parameters,
        micro._replace(table=table),
        FixedLogprobs(None, None),
        loss_config=loss_config._replace(
            settings=plain, objective=_log_probability, loss_coefficients=LossCoefficients(0.0, 0.0)
        ),
        position=StepPosition(0, 0.0),
        turns=turns,
    )
    return float(np.array(global_norm(gradient.arrays))) ** 2


def _log_probability(logp_N: mx.array, tokens: ObjectiveInputs, settings: Reinforce) -> PolicyLoss:
    return PolicyLoss(logp_N, mx.zeros_like(logp_N))


def _watched(logp_N: mx.array, slopes: list[mx.array]) -> mx.array:
    """Return the log-probabilities unchanged; their cotangent is appended when the backward pass is built."""

    @mx.custom_function
    def watch(logp_N: mx.array) -> mx.array:
        return logp_N

    @watch.vjp
    def record(logp_N: mx.array, cotangent_N: mx.array, output_N: mx.array) -> mx.array:
        slopes.append(cotangent_N)
        return cotangent_N

    return cast(mx.array, watch(logp_N))


def compute_logprobs(
    policy: WeightedModel,
    forcing: TeacherForcing,
    micro: MicroBatch,
    distribution: SamplingDistribution,
    *,
    turns: TurnBudget,
) -> mx.array:
    """Return the log-probabilities of a micro-batch's tokens with the present weights: (N,) float32, evaluated."""
    unaided = micro._replace(table=micro.table._replace(teacher=None))
    with turns.recorded(policy.model, gradients=False) as stages:
        logp_N = forcing(unaided, distribution=distribution).logp_N
    turns.evaluate(stages.take(), logp_N)
    return logp_N


def add_gradients(total: MicroBatchGradient | None, part: MicroBatchGradient) -> MicroBatchGradient:
    """Return the sum of two gradients, evaluated, with the tokens of the first; `part` itself if it is the first."""
    if total is None:
        return part
    arrays = {name: array + part.arrays[name] for name, array in total.arrays.items()}
    metrics = {
        name: sums + part.metrics[name] if name in part.metrics else sums for name, sums in total.metrics.items()
    }
    added = total._replace(arrays=arrays, loss=total.loss + part.loss, metrics=part.metrics | metrics)
    mx.eval(added)
    return added


def _inputs(micro: MicroBatch, fixed_logprobs: FixedLogprobs, position: StepPosition) -> TokenLossInputs:
    table = micro.table
    on_policy_mask_N = (table.version_N == position.version) & (position.progress == 0)
    return TokenLossInputs(
        rollout_logp_N=mx.array(table.rollout_logp_N),
        proximal_N=fixed_logprobs.proximal_N if position.progress else None,
        reference_N=fixed_logprobs.reference_N,
        advantage_N=mx.array(table.advantage_N),
        loss_mask_N=mx.array(table.loss_mask_N),
        loss_weight_N=mx.array(table.loss_weight_N),
        on_policy_mask_N=mx.array(on_policy_mask_N.astype("float32")),
        sequence_N=mx.array(table.sequence_N),
        sequences=micro.sequences,
        group_B=mx.array(micro.group_B),
        reference_point=fixed_logprobs.reference_point,
        teacher_mask_N=mx.array(table.teacher_mask_N) if table.teacher is not None else None,
        teacher_logp_N=None if table.teacher_logp_N is None else mx.array(table.teacher_logp_N),
    )


def _in_order_of_blocks(gradient: MicroBatchGradient) -> tuple[list[mx.array], MicroBatchGradient]:
    """Put the gradients first, block by block: in the names' order (0, 1, 10, 11, 2 ...) activations stay alive."""
    names = sorted(gradient.arrays, key=block_of)
    return [gradient.arrays[name] for name in names], gradient
