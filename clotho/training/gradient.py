"""Loss and gradient of one micro-batch, evaluated in turns of bounded length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from clotho.models.parameters import Arrays, Parameters, flat, nested
from clotho.models.policy_model import WeightedModel
from clotho.models.stages import block_of, watched
from clotho.models.turns import TurnBudget
from clotho.scoring.sequences import MicroBatch
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.learner import LearnerSection
from clotho.settings.objectives import RatioObjective
from clotho.training.objectives.contract import Objective, ObjectiveInputs
from clotho.training.objectives.importance_correction import interpolated_proximal
from clotho.training.objectives.loss import LossCoefficients, MetricSums, TokenLossInputs, policy_loss


class LossConfig(NamedTuple):
    """What determines the loss and does not change during an update."""

    settings: LearnerSection
    objective: Objective
    loss_coefficients: LossCoefficients


class FixedLogprobs(NamedTuple):
    """Log-probabilities of a micro-batch's tokens under fixed policies, (N,) float32; None if not needed.

    reference_N: under the reference policy. proximal_N: under the policy at the start of the batch; the first optimizer
    step takes those of its own pass, so that the rounding of another one is in no ratio. reference_point: that of the
    update (`ObjectiveInputs`).
    """

    reference_N: mx.array | None = None
    proximal_N: mx.array | None = None
    reference_point: float = 0.0


class StepPosition(NamedTuple):
    """Position of a gradient: version at the start of the update, and the fraction of its optimizer steps taken."""

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
        """Return the sum of all shares with the own sum, and others' gradients by micro-batch, without arrays."""

    def assign_logprobs(
        self, micro_batches: Sequence[MicroBatch], parameters: Parameters | None, reference: Arrays
    ) -> Sequence[int]:
        """Send shares of a forward pass, of the reference if `parameters` is None; return the own indices."""

    def collect_logprobs(self, turns: TurnBudget) -> dict[int, mx.array]:
        """Return the log-probabilities of the others' micro-batches by index."""


class LearnerModel(NamedTuple):
    """The model of a learner, and how it computes. ranks: compute a share of the micro-batches; None: alone."""

    policy: WeightedModel
    forcing: TeacherForcing
    distribution: SamplingDistribution
    turns: TurnBudget
    ranks: OtherRanks | None = None

    def logprobs(self, micro: MicroBatch) -> mx.array:
        """Return the log-probabilities of a micro-batch's tokens with the present weights: (N,) float32, evaluated."""
        unaided = micro._replace(table=micro.table._replace(teacher=None))
        with self.turns.recorded(self.policy.model, gradients=False) as stages:
            logp_N = self.forcing(unaided, distribution=self.distribution).logp_N
        self.turns.evaluate(stages.take(), logp_N)
        return logp_N

    def gradient(
        self,
        parameters: Parameters,
        micro: MicroBatch,
        fixed_logprobs: FixedLogprobs,
        *,
        loss_config: LossConfig,
        position: StepPosition,
        token_gradients: bool = False,
    ) -> MicroBatchGradient:
        """Return the gradient of one micro-batch's loss with respect to `parameters`. Those of micro-batches add up.

        Gradients are float32. Only trainable parameters are differentiated. Afterwards the model has `parameters`, no
        tracer and no changed mode. Tokens count as on-policy while the weights are those of the start of the update.
        token_gradients: also return the gradient at each token, which the backward pass contains already.
        """
        slopes: list[mx.array] | None = [] if token_gradients else None
        loss = self._loss(micro, fixed_logprobs, loss_config, position, slopes)
        # While it traces, MLX puts its tracers into the very containers it is given; others read the learner's.
        own = nested(flat(parameters))
        try:
            with self.policy.training_mode(), self.turns.recorded(self.policy.model, gradients=True) as stages:
                (value, metrics, logp_N, cut_N), tree = mx.value_and_grad(loss)(own)
        finally:
            self.policy.use(parameters)
        arrays = {name: array.astype(mx.float32) for name, array in flat(tree).items()}
        tokens: tuple[TokenGradient, ...] = ()
        if slopes is not None:  # a custom loss may not depend on log-probabilities
            tokens = (TokenGradient(slopes[0] if slopes else mx.zeros_like(logp_N), cut_N),)
        gradient = MicroBatchGradient(arrays, value, metrics, logp_N, tokens)
        self.turns.evaluate(stages.take(arrays), _in_order_of_blocks(gradient))
        return gradient

    def _loss(
        self,
        micro: MicroBatch,
        fixed_logprobs: FixedLogprobs,
        loss_config: LossConfig,
        position: StepPosition,
        slopes: list[mx.array] | None,
    ) -> Callable[[Parameters], tuple[mx.array, MetricSums, mx.array, mx.array]]:
        """Return the loss of traced parameters, with metrics, scores and cuts. slopes: receives d loss / d logp."""
        inputs, chosen = _inputs(micro, fixed_logprobs, position), loss_config.settings.objective
        logp_only = loss_config.loss_coefficients.entropy_coef == 0.0 and micro.table.teacher is None
        interpolates = isinstance(chosen, RatioObjective) and chosen.ratio_reference == "batch_start_interpolated"

        def loss(traced: Parameters) -> tuple[mx.array, MetricSums, mx.array, mx.array]:
            """Compute the loss with these parameters."""
            self.policy.use(traced)
            scores, of_experts = self.forcing.with_experts(micro, distribution=self.distribution, logp_only=logp_only)
            seen = inputs
            if interpolates and position.progress > 0:
                proximal_N = interpolated_proximal(
                    mx.stop_gradient(scores.logp_N),
                    inputs.tokens.rollout_logp_N,
                    mx.array(micro.table.version_N),
                    version_proximal=position.version,
                    version_current=position.version + position.progress,
                )
                seen = inputs._replace(proximal_N=proximal_N)
            value, metrics, cut_N = policy_loss(
                scores.logp_N if slopes is None else watched(scores.logp_N, slopes),
                scores.entropy_N,
                seen,
                cross_entropy_N=scores.cross_entropy_N,
                settings=loss_config.settings,
                loss_coefficients=loss_config.loss_coefficients,
                objective=loss_config.objective,
            )
            return value, metrics | of_experts, mx.stop_gradient(scores.logp_N), cut_N

        return loss

    def minibatch_gradient(
        self,
        parameters: Parameters,
        micro_batches: Sequence[MicroBatch],
        fixed_logprobs: Sequence[FixedLogprobs],
        *,
        loss_config: LossConfig,
        position: StepPosition,
        token_gradients: bool = False,
    ) -> tuple[MicroBatchGradient, list[MicroBatchGradient]]:
        """Return the gradient of a minibatch, and the gradients of its micro-batches without their arrays."""
        own: Sequence[int] = range(len(micro_batches))
        how: Any = {"loss_config": loss_config, "position": position, "token_gradients": token_gradients}
        if self.ranks is not None:
            own = self.ranks.assign_gradients(micro_batches, fixed_logprobs, parameters, **how)
        total: MicroBatchGradient | None = None
        parts: dict[int, MicroBatchGradient] = {}
        for k in own:
            part = self.gradient(parameters, micro_batches[k], fixed_logprobs[k], **how)
            total = add_gradients(total, part)
            parts[k] = part._replace(arrays={})
            self.turns.pause()
        assert total is not None
        if self.ranks is not None:
            total, others = self.ranks.add_gradients(total, self.turns)
            parts |= others
        return total, [parts[k] for k in range(len(micro_batches))]


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
    rollout_logp_N = mx.array(table.rollout_logp_N)
    tokens = ObjectiveInputs(
        old_logp_N=rollout_logp_N,
        rollout_logp_N=rollout_logp_N,
        advantage_N=mx.array(table.advantage_N),
        loss_mask_N=mx.array(table.loss_mask_N),
        sequence_N=mx.array(table.sequence_N),
        sequences=micro.sequences,
        group_B=mx.array(micro.group_B),
        reference_logp_N=fixed_logprobs.reference_N,
        reference_point=fixed_logprobs.reference_point,
    )
    return TokenLossInputs(
        tokens=tokens,
        proximal_N=fixed_logprobs.proximal_N if position.progress else None,
        loss_weight_N=mx.array(table.loss_weight_N),
        on_policy_mask_N=mx.array(on_policy_mask_N.astype("float32")),
        teacher_mask_N=mx.array(table.teacher_mask_N) if table.teacher is not None else None,
        teacher_logp_N=None if table.teacher_logp_N is None else mx.array(table.teacher_logp_N),
    )


def _in_order_of_blocks(gradient: MicroBatchGradient) -> tuple[list[mx.array], MicroBatchGradient]:
    """Put the gradients first, block by block: in the names' order (0, 1, 10, 11, 2 ...) activations stay alive."""
    names = sorted(gradient.arrays, key=block_of)
    return [gradient.arrays[name] for name in names], gradient
