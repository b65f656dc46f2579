"""An update in two calls: gradients of losses that add up, and one optimizer step along their sum.

The gradient, the step and the transaction are those of `PolicyLearner.update`: the groups of one update with one
minibatch and one epoch, given to `forward_backward`, lead to the same weights bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from clotho.models.loading import computing_dtype
from clotho.models.parameters import Arrays, flat, nested
from clotho.scoring.sequences import sampled_mask_T
from clotho.settings.bounds import Off
from clotho.settings.learner import LearnerSection, Optimizer
from clotho.settings.objectives import Objective, ObjectiveSettings, Sft
from clotho.training.batch import Minibatch, compute_advantages, scored
from clotho.training.gradient import FixedLogprobs, LossConfig, MicroBatchGradient, StepPosition, add_gradients
from clotho.training.learner_state import with_prefix
from clotho.training.objectives.functions import objective, reinforce, require_exact_ratio
from clotho.training.objectives.loss import LossCoefficients
from clotho.training.optimizer_steps import (
    MetricTotals,
    OptimizerProgress,
    completion_weights,
    metric_means,
    take_step,
)
from clotho.training.optimizers import learning_rate as scheduled_rate
from clotho.training.optimizers import rule_name
from clotho.training.update import PolicyLearner, Update
from protocols.errors import CheckpointError
from protocols.rollout import ScoredGroup
from protocols.sampling import Completion


class LossInputs(NamedTuple):
    """What a loss of one's own knows of the data: arrays of MLX without gradient, one row for each datum, in order.

    T is the length of the longest completion; shorter rows end with zeros, and their mask with 0.

    tokens_B_T: int32. mask_B_T: 1 for tokens that the policy sampled, 0 for inserted tokens and padding.
    advantages_B_T: as given. sampler_logp_B_T: log-probabilities in nats under the policy that sampled the tokens; 0
    where they are unknown. versions_B_T: int32, the policy version that sampled each token. weights_B_T: share of each
    token in a mean over the data, by the `loss_aggregation` of the objective; all add up to 1 (`token_sum`: to less).
    """

    tokens_B_T: mx.array
    mask_B_T: mx.array
    advantages_B_T: mx.array
    sampler_logp_B_T: mx.array
    versions_B_T: mx.array
    weights_B_T: mx.array


CustomLoss = Callable[[mx.array, LossInputs], tuple[mx.array, Mapping[str, mx.array | float]]]
"""loss(logp_B_T, inputs) -> (scalar to be minimized, metrics). logp_B_T: with gradient, in nats, 0 at padding."""

Loss = Literal["objective", "cross_entropy"] | ObjectiveSettings | CustomLoss


class Gradient(Struct, frozen=True, kw_only=True):
    """What one `forward_backward` computed.

    loss: of its data. metrics: means over the tokens, under the names of metrics.jsonl, or those of a loss of one's
    own. tokens: number of tokens that were trained on. logprobs: of each datum, the log-probabilities of its tokens in
    nats under the newest parameters; 0 at tokens that the policy did not sample.
    """

    loss: float
    metrics: Mapping[str, float]
    tokens: int
    logprobs: tuple[tuple[float, ...], ...]


NOTHING = Gradient(loss=0.0, metrics={}, tokens=0, logprobs=())
"""The gradient of no token."""


class _Held(NamedTuple):
    """The sum of the gradients since the last step. log_weights: as for `take_step`."""

    total: MicroBatchGradient | None
    log_weights: tuple[NDArray[np.float64], ...]
    tokens: int


class StepwiseLearner(PolicyLearner):
    """A `PolicyLearner` whose updates can also be made of gradients and steps."""

    _held: _Held | None = None

    def forward_backward(self, groups: Sequence[ScoredGroup], loss: Loss = "objective") -> Gradient:
        """Add the gradient of a loss of the groups' completions to the gradient that the next step takes.

        groups: with advantages per token. objective: the loss of an update of these groups, with
        its KL penalty and its entropy bonus. cross_entropy: minus advantage times log-probability, averaged as the
        objective's `loss_aggregation` says. The settings of an objective: that objective in place of the learner's. A
        loss of one's own is called once, with all data.
        Raises ValueError if the policy sampled no token, or if the loss returns something else, and ProfileError for an
        objective that the learner cannot evaluate.
        """
        self.turns.begin()
        try:
            if loss == "objective" or isinstance(loss, ObjectiveSettings):
                config = self._loss_config(replace(self._settings, num_minibatches=1, update_epochs=1))
                if isinstance(loss, ObjectiveSettings):
                    config = self._with_objective(config, cast(Objective, loss))
                batch = self._prepare(groups, config, self._computing, step=self._state.updates)
                if not batch.minibatches:  # all completions are truncated, and masked therefore
                    return NOTHING
                return self._add(groups, batch.minibatches[0], batch.fixed_logprobs[0], config)
            config = self._plain_config()
            mini = self._minibatch(groups, config.settings)
            fixed = [FixedLogprobs()] * len(mini.micro_batches)
            if loss == "cross_entropy":
                found = self._add(groups, mini, fixed, config)
                return replace(found, metrics={})
            value, metrics, mini = self._slopes(groups, mini, loss)
            found = self._add(groups, mini, fixed, config)
            return replace(found, loss=value, metrics=metrics)
        finally:
            self.model.release()

    def logprobs(self, groups: Sequence[ScoredGroup]) -> tuple[tuple[float, ...], ...]:
        """Return the log-probabilities of the completions' tokens under the newest parameters, as in `Gradient`."""
        self.turns.begin()
        try:
            mini = self._minibatch(groups, self._plain_config().settings)
            return _rows(groups, mini, self._scores(mini))
        finally:
            self.model.release()

    def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        optimizer: Optimizer | None = None,
        max_grad_norm: float | None = None,
        steps_at_zero: bool = False,
    ) -> Update:
        """Take one optimizer step along the gradient that is held, and hold none afterwards.

        All or nothing: without a gradient, with one that is not finite, or exactly zero unless `steps_at_zero`, the
        weights stay. learning_rate: that of the schedule by default. optimizer, max_grad_norm: of this step, in place
        of the learner's.
        Raises ValueError for an optimizer of another type than the learner's, whose state it continues.
        """
        settings = self._settings
        if optimizer is not None and type(optimizer) is not type(settings.optimizer):
            raise ValueError(f"the state is that of {rule_name(settings.optimizer)}, not of {rule_name(optimizer)}")
        settings = replace(
            settings,
            optimizer=settings.optimizer if optimizer is None else optimizer,
            max_grad_norm=settings.max_grad_norm if max_grad_norm is None else max_grad_norm,
        )
        held, self._held = self._held or _Held(None, (), 0), None
        rate = learning_rate
        if rate is None:
            rate = scheduled_rate(self._state.updates, steps=self._steps, settings=self._settings)
        rate *= self._state.rate_factor
        start, totals = OptimizerProgress(self.parameters, self._state.optimizer), MetricTotals()
        progress: OptimizerProgress | None = start
        if held.total is not None:
            progress = take_step(
                start,
                held.total,
                held.log_weights,
                settings=settings,
                learning_rate=rate,
                totals=totals,
                rule=self.rule,
                step=self._state.updates,
                steps_at_zero=steps_at_zero,
            )
        metrics = totals.metrics(
            tokens=held.tokens,
            learning_rate=rate,
            loss_coefficients=self._state.loss_coefficients,
            steps=progress.steps if progress is not None else 0,
        )
        return self._finished(progress, metrics)

    def whole_state(self) -> Arrays:
        """Name every array of the learner, the parameters and the version included; a gradient is not part of it."""
        arrays = {f"parameters.{name}": array for name, array in flat(self.parameters).items()}
        arrays |= {f"state.{name}": array for name, array in self.state().items()}
        return arrays | {"version": mx.array(self.version, dtype=mx.int64)}

    def restore_whole(self, arrays: Arrays) -> None:
        """Continue from what `whole_state` named. Raises CheckpointError, and changes nothing, if it does not fit."""
        parameters = nested(with_prefix(arrays, "parameters."))
        try:
            self.model.use(parameters)
            self.restore(with_prefix(arrays, "state."))
            version = int(np.array(arrays["version"]))
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"the state is not one of this policy and these settings: {error}") from error
        finally:
            self.model.release()
        self._held = None
        self._set_parameters(parameters)
        self.version = version

    def _with_objective(self, config: LossConfig, chosen: Objective) -> LossConfig:
        require_exact_ratio(chosen, computing_dtype(self.model.model))
        return config._replace(settings=replace(config.settings, objective=chosen), objective=objective(chosen))

    def _plain_config(self) -> LossConfig:
        """Return the configuration of a loss that is linear in the log-probabilities, without penalties."""
        chosen = Sft(loss_aggregation=self._settings.objective.loss_aggregation)
        settings = replace(
            self._settings, objective=chosen, kl_penalty=Off(), distillation_weight=0.0, num_minibatches=1
        )
        return LossConfig(settings, reinforce, LossCoefficients(0.0, 0.0))

    def _minibatch(self, groups: Sequence[ScoredGroup], settings: LearnerSection) -> Minibatch:
        advantages = compute_advantages(groups, (), settings)
        (mini,) = self._division(settings, self._computing).minibatches(groups, advantages)
        return mini

    def _scores(self, mini: Minibatch) -> list[mx.array]:
        return scored(self._computing, [mini], self.parameters)[0]

    def _slopes(
        self, groups: Sequence[ScoredGroup], mini: Minibatch, loss: CustomLoss
    ) -> tuple[float, dict[str, float], Minibatch]:
        """Call a loss with all data. Returns its value, its metrics, and data whose cross-entropy has its gradient.

        The gradient of sum_t s_t log pi_t, with s_t = d loss / d log pi_t held fixed, is that of the loss. So any loss
        of the log-probabilities can be cut into micro-batches, also one that compares completions.
        """
        logp_B_T = mx.array(_table(groups, mini, [np.array(one) for one in self._scores(mini)]))
        inputs = _loss_inputs(groups, mini)

        def traced(logp_B_T: mx.array) -> tuple[mx.array, list[mx.array]]:
            found = loss(logp_B_T, inputs)
            if not isinstance(found, tuple) or len(found) != 2 or found[0].size != 1:
                raise ValueError("a loss returns (loss, metrics): a scalar, and numbers by name, such as {}")
            value, metrics = found
            names[:] = metrics
            return value, [mx.array(one) for one in metrics.values()]

        names: list[str] = []
        (value, metrics), slope_B_T = mx.value_and_grad(traced)(logp_B_T)
        mx.eval(value, metrics, slope_B_T)
        slopes = np.array(slope_B_T)
        parts = []
        for part, (row_N, column_N) in zip(mini.micro_batches, _places(groups, mini), strict=True):
            advantage_N = np.zeros_like(part.table.advantage_N)
            advantage_N[: len(row_N)] = -slopes[row_N, column_N]
            table = part.table._replace(advantage_N=advantage_N, loss_weight_N=part.table.loss_mask_N)
            parts.append(part._replace(table=table))
        numbers = {name: float(np.array(one)) for name, one in zip(names, metrics, strict=True)}
        return float(np.array(value)), numbers, mini._replace(micro_batches=tuple(parts))

    def _add(
        self,
        groups: Sequence[ScoredGroup],
        mini: Minibatch,
        fixed: Sequence[FixedLogprobs],
        config: LossConfig,
    ) -> Gradient:
        """Add the gradient of a minibatch to the one that is held."""
        position = StepPosition(self.version, 0.0)
        total, parts = self._computing.minibatch_gradient(
            self.parameters, mini.micro_batches, fixed, loss_config=config, position=position
        )
        log_weights = completion_weights(mini, parts, config.settings)
        held = self._held or _Held(None, (), 0)
        kept = total._replace(metrics={}) if isinstance(config.settings.objective, Sft) else total
        self._held = _Held(
            add_gradients(held.total, kept), (*held.log_weights, *log_weights), held.tokens + mini.tokens
        )
        means = metric_means({name: np.array(sums) for name, sums in total.metrics.items()})
        means.pop("ratio_squared_mean", None)
        rows = _rows(groups, mini, [found.logp_N for found in parts])
        return Gradient(loss=float(total.loss), metrics=means, tokens=mini.tokens, logprobs=rows)


def _completions(groups: Sequence[ScoredGroup]) -> list[Completion]:
    return [completion for group in groups for completion in group.group.completions]


def _places(groups: Sequence[ScoredGroup], mini: Minibatch) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Yield for each micro-batch the row and the column of its tokens in arrays of all data, without padding."""
    firsts = np.cumsum([0, *(len(group.rewards) for group in groups)])
    for part in mini.micro_batches:
        rows, columns = [], []
        for member in part.members:
            group, i = mini.origins[member]
            columns.append(np.flatnonzero(sampled_mask_T(groups[group].group.completions[i])))
            rows.append(np.full(len(columns[-1]), firsts[group] + i))
        yield np.concatenate(rows), np.concatenate(columns)


def _table(
    groups: Sequence[ScoredGroup], mini: Minibatch, values: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return the values of all tokens, given by micro-batch, as one array (B, T)."""
    completions = _completions(groups)
    table_B_T = np.zeros((len(completions), max(len(one.tokens) for one in completions)), dtype=np.float32)
    for value_N, (row_N, column_N) in zip(values, _places(groups, mini), strict=True):
        table_B_T[row_N, column_N] = value_N[: len(row_N)]
    return table_B_T


def _rows(
    groups: Sequence[ScoredGroup], mini: Minibatch, logprobs: Sequence[mx.array]
) -> tuple[tuple[float, ...], ...]:
    completions = _completions(groups)
    table_B_T = _table(groups, mini, [np.array(one) for one in logprobs])
    return tuple(tuple(row_T[: len(one.tokens)].tolist()) for row_T, one in zip(table_B_T, completions, strict=True))


def _loss_inputs(groups: Sequence[ScoredGroup], mini: Minibatch) -> LossInputs:
    tables = [part.table for part in mini.micro_batches]

    def array(name: str) -> mx.array:
        return mx.array(_table(groups, mini, [getattr(table, name) for table in tables]))

    completions = _completions(groups)
    T = max(len(one.tokens) for one in completions)
    tokens = [(*one.tokens, *(0,) * (T - len(one.tokens))) for one in completions]
    versions = [(*one.versions, *(0,) * (T - len(one.versions))) for one in completions]
    return LossInputs(
        tokens_B_T=mx.array(tokens, dtype=mx.int32),
        mask_B_T=array("loss_mask_N"),
        advantages_B_T=array("advantage_N"),
        sampler_logp_B_T=array("rollout_logp_N"),
        versions_B_T=mx.array(versions, dtype=mx.int32),
        weights_B_T=array("loss_weight_N"),
    )
