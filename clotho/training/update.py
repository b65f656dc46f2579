"""One policy update, as a transaction: everything is computed first, then applied as a whole or not at all.

An update passes through these modules in this order; docs/numerics-internals.md has the equations.

1. `batch` scores the tokens under the reference policy, and under the policy at the start of the batch if an optimizer
   step but the first needs that, because the weights are about to change. `advantages` turns rewards, less a penalty,
   into advantages; those of tokens that the policy did not sample and of masked completions are 0. Groups are dealt to
   minibatches by a seeded permutation and cut into micro-batches (`scoring.layouts`) of at most
   `learner.micro_batch_tokens` positions. Every token has a loss weight, so that the loss is the same for any split.
2. `optimizer_steps` takes one step per minibatch and epoch. `gradient` runs the model on prompts and completions
   (`scoring.teacher_forcing`) and differentiates `objectives.loss`; the gradients of micro-batches add up in float32.
   The values of single tokens (`TokenRecorder`) are by-products of the first gradient that uses each token.
   `optimizers` clips the gradient by its global norm and makes new arrays. A loss or gradient that is not finite ends
   the update here: the old parameters and the old state are still in place. A gradient of exactly zero takes no step.
3. A measure says how far the update moved the policy, if asked to; `AdapterCheck` raises if an adapter does not move.
4. The result is applied: coefficients of the next update, a moving reference policy, parameters, optimizer state,
   version and weights hash change together. The learner then publishes the new weights.

The learner computes with a model of its own, in a thread of its own. `models.turns` divides the computation into turns,
between which others may compute. An exception at any point changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from clotho.extension import needs
from clotho.models.loading import computing_dtype
from clotho.models.machine import random_state, restore_random_state
from clotho.models.parameters import Arrays, Parameters, fingerprint, flat
from clotho.models.policy import TrainablePolicy
from clotho.models.turns import UNSHARED, TurnBudget, Turns
from clotho.scoring.teacher_forcing import ROUTER_REPLAY, TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.settings.learner import LearnerSection, RouterReplay
from clotho.training.batch import Division, Minibatch, PerTokenAdvantages, TrainingBatch, UpdateStart, prepare
from clotho.training.gradient import LearnerModel, LossConfig, OtherRanks
from clotho.training.learner_state import LearnerSnapshot, LearnerState, state_arrays, state_from_arrays, with_prefix
from clotho.training.objectives.functions import objective, require_exact_ratio
from clotho.training.objectives.loss import initial_loss_coefficients, next_loss_coefficients
from clotho.training.optimizer_steps import MetricTotals, OptimizerProgress, TokenRecorder, take_optimizer_steps
from clotho.training.optimizers import PLAIN, StepRule, learning_rate
from clotho.training.reference_policy import ReferencePolicy
from protocols.errors import AdapterError, ModelError
from protocols.learnability import require_learnable
from protocols.rollout import ScoredGroup
from protocols.sampling import Sampling
from protocols.step import TokenValues, UpdateMetrics


class UpdateMeasure(Protocol):
    """Measures how far an update moves the policy (`UpdateMetrics.update_kl`)."""

    def is_due(self, step: int, /) -> bool:
        """Whether the update of this step is measured."""

    def __call__(
        self,
        groups: Sequence[ScoredGroup],
        mini: Minibatch,
        before: Sequence[mx.array],
        model: LearnerModel,
        *,
        after: Parameters,
        micro_batch_tokens: int,
    ) -> float:
        """Return KL(before || after) in nats per token. before: log-probabilities by micro-batch of `mini`."""


class Update(Struct, frozen=True, kw_only=True):
    """Result of one update. The new weights serve only after they are published.

    parameters, version, fingerprint: the newest weights, unchanged if the update was not applied.
    advantages: per group and completion, the mean over the tokens that the policy sampled.
    tokens: per group and completion, the values of its tokens; empty if they are not recorded, or the update was not
    applied.
    applied: whether the weights changed. finite: False if a loss or gradient was not finite. Not applied but finite
    means that the gradient was exactly zero.
    """

    parameters: Parameters
    version: int
    fingerprint: str
    metrics: UpdateMetrics
    advantages: tuple[tuple[float, ...], ...]
    applied: bool
    finite: bool
    tokens: tuple[tuple[TokenValues, ...], ...] = ()

    def __repr__(self) -> str:
        """Show what fits on a screen: not the arrays, and no value per completion or token."""
        shown = ("version", "fingerprint", "applied", "finite", "metrics")
        return f"Update({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)}, ...)"


class _Computed(NamedTuple):
    """A computed update before it is applied. progress: None if a loss or gradient was not finite."""

    batch: TrainingBatch
    progress: OptimizerProgress | None
    metrics: UpdateMetrics
    record: TokenRecorder | None


class PolicyLearner:
    """Holds the newest parameters and the state that training carries from update to update.

    The newest parameters need not be published before the next update starts from them. It belongs to one thread.
    turns: limits the turns of updates. model: computes with the weights of the update, or as the reference policy;
    released after each update.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        learner: LearnerSection,
        sampling: Sampling,
        *,
        steps: int,
        first_step: int = 0,
        seed: int = 0,
        measure: UpdateMeasure | None = None,
        recorder: Callable[[], TokenRecorder] | None = None,
        ranks: OtherRanks | None = None,
        lane: Turns = UNSHARED,
        rule: StepRule = PLAIN,
    ) -> None:
        """Start from the served parameters.

        steps: length of the learning-rate schedule. first_step: the step at which it begins. seed: for dealing groups
        to minibatches.
        measure: measures updates; None: nothing does. Nor is one measured whose loss has no importance ratio (`sft`).
        recorder: makes what records the values of tokens in an update (`Update.tokens`); None: nothing does.
        ranks: the other ranks of a data-parallel learner; updates use them, rehearsals do not.
        lane: between turns, others compute. rule: of optimizer steps.
        Raises ProfileError if the learner cannot evaluate the sampling distribution, cannot load the objective or
        rounds too much for its ratio, and ModelError if the model does not support the layout or the replay of routes.
        """
        require_learnable(sampling)
        self._policy, self._settings, self._seed = policy, learner, seed
        self._steps, self._first_step = steps, first_step
        self._max_tokens = sampling.max_tokens
        self._measure, self._recorder = measure, recorder
        self._objective, self.rule = objective(learner.objective), rule
        self.model = policy.copy_model()
        require_exact_ratio(learner.objective, computing_dtype(self.model.model))
        forcing = TeacherForcing(self.model.model, self.model.vocab_size, layout=learner.layout)
        _require_replay(learner.router_replay, forcing)
        self.turns = TurnBudget(learner.max_turn_ms / 1000.0, lane)
        distribution = SamplingDistribution(sampling.temperature, sampling.logit_bias)
        self._computing = LearnerModel(self.model, forcing, distribution, self.turns, ranks)
        self._adapter_check = AdapterCheck()
        self.begin()

    @property
    def forcing(self) -> TeacherForcing:
        """What scores micro-batches in the layout of the learner."""
        return self._computing.forcing

    def begin(self) -> None:
        """Start from the served parameters, with new states of optimizer, coefficients and reference policy."""
        self._reference = ReferencePolicy(self._policy, self._settings)
        self._start_from_served()
        self._state = LearnerState(
            optimizer=self.rule.initial_state(flat(self.parameters), self._settings),
            loss_coefficients=initial_loss_coefficients(self._settings),
        )

    def _start_from_served(self) -> None:
        self.parameters = self._policy.trainable()
        self.version = self._policy.version
        self.fingerprint = self._policy.fingerprint

    def update(
        self, groups: Sequence[ScoredGroup], *, step: int | None = None, replayed: Sequence[ScoredGroup] = ()
    ) -> Update:
        """Train on a batch of groups.

        step: number of batches before this one, which selects the learning rate; by default the number of updates
        applied. replayed: groups to train on as well, without results of their own. Raises ValueError if the policy
        sampled no token.
        """
        step = self._state.updates if step is None else step - self._first_step
        try:
            batch, progress, metrics, record = self._compute(
                [*groups, *replayed], step, self._computing, measure_update_kl=self._measures(step)
            )
        finally:
            self.model.release()
        tokens = record.values(groups, batch) if record is not None and metrics.update_applied else ()
        found = self._finished(progress, metrics)
        return replace(found, advantages=_per_completion(groups, batch.advantages), tokens=tokens)

    def _measures(self, step: int) -> bool:
        return self._measure is not None and self._settings.objective.has_ratio and self._measure.is_due(step)

    def _finished(self, progress: OptimizerProgress | None, metrics: UpdateMetrics) -> Update:
        """Apply what was computed, if it moves the weights."""
        if progress is not None and metrics.update_applied:
            self._apply(progress, metrics)
        return Update(
            parameters=self.parameters,
            version=self.version,
            fingerprint=self.fingerprint,
            metrics=metrics,
            advantages=(),
            applied=metrics.update_applied,
            finite=progress is not None,
        )

    def compute_and_discard(self, groups: Sequence[ScoredGroup]) -> None:
        """Compute the first update from these groups, and discard it together with the random numbers that it used."""
        self.rehearse([(0, groups)], measure_update_kl=self._measures(0))

    def rehearse(
        self, batches: Iterable[tuple[int, Sequence[ScoredGroup]]], *, measure_update_kl: bool = False
    ) -> list[UpdateMetrics | None]:
        """Compute updates, each after the one before, and return their metrics. Nothing changes.

        batches: of each update the step, which selects the learning rate, and the groups; an iterator is asked for the
        next batch after each update. measure_update_kl: measure how far each update moves the policy. Groups of an
        earlier update give no valid value, because they are taken for samples of the policy before its update. An
        update that is not finite has None, and is the last. The random numbers that the updates used are available
        again afterwards.
        """
        found: list[UpdateMetrics | None] = []
        before, random = (self.snapshot(), self.version, self.fingerprint, self._adapter_check), random_state()
        computed, alone = cast(_Computed | None, None), self._computing._replace(ranks=None)
        self._adapter_check = AdapterCheck()
        try:
            for step, groups in batches:
                if computed is not None and computed.progress is not None and computed.metrics.update_applied:
                    self._apply(computed.progress, computed.metrics)
                computed = self._compute(groups, step, alone, measure_update_kl=measure_update_kl)
                found.append(computed.metrics if computed.progress is not None else None)
                if computed.progress is None:
                    break
        finally:
            self.model.release()
            restore_random_state(random)
            (self.parameters, self._state, reference), self.version, self.fingerprint, self._adapter_check = before
            self._reference.restore(reference)
        return found

    def _compute(
        self, groups: Sequence[ScoredGroup], step: int, model: LearnerModel, *, measure_update_kl: bool
    ) -> _Computed:
        self.turns.begin()
        loss_config = self._loss_config(self._settings)
        batch = self._prepare(groups, loss_config, model, step=step)
        rate = learning_rate(step, steps=self._steps, settings=self._settings) * self._state.rate_factor
        totals, record = MetricTotals(), self._recorder() if self._recorder is not None else None
        progress = take_optimizer_steps(
            batch,
            OptimizerProgress(self.parameters, self._state.optimizer),
            model,
            loss_config=loss_config,
            version=self.version,
            learning_rate=rate,
            totals=totals,
            record=record,
            rule=self.rule,
            step=step,
        )
        metrics = totals.metrics(
            tokens=batch.tokens,
            learning_rate=rate,
            loss_coefficients=loss_config.loss_coefficients,
            steps=progress.steps if progress is not None else 0,
        )
        if progress is not None and metrics.update_applied and measure_update_kl and self._measure is not None:
            kl = self._measure(
                groups,
                batch.minibatches[0],
                progress.initial_logp,
                model,
                after=progress.parameters,
                micro_batch_tokens=self._settings.micro_batch_tokens,
            )
            metrics = replace(metrics, update_kl=kl)
        if metrics.flipped_routes is not None:
            metrics = replace(metrics, replayed_routes=self._replays)
        return _Computed(batch, progress, metrics, record)

    def _loss_config(self, settings: LearnerSection) -> LossConfig:
        return LossConfig(settings, self._objective, self._state.loss_coefficients)

    def _division(self, settings: LearnerSection, model: LearnerModel, *, step: int = 0) -> Division:
        least = 1 if model.ranks is None else model.ranks.pieces
        return Division(settings, self._max_tokens, model.forcing.layout, (self._seed, step), least, self._replays)

    def _prepare(
        self, groups: Sequence[ScoredGroup], loss_config: LossConfig, model: LearnerModel, *, step: int
    ) -> TrainingBatch:
        division = self._division(loss_config.settings, model, step=step)
        return prepare(UpdateStart(groups, model, division, self.parameters, self._reference, loss_config))

    @property
    def _replays(self) -> bool:
        """Whether the next update takes the routes of the sampler; once that is so, it stays so."""
        mode = self._settings.router_replay
        asked = mode == "on" or (mode == "auto" and (self._state.replays or self._policy.flips_routes))
        return asked and self.forcing.can_replay

    def _apply(self, progress: OptimizerProgress, metrics: UpdateMetrics) -> None:
        before = self._state
        assert progress.gradients is not None
        if not self.rule.keeps_zeros:
            self._adapter_check.check(flat(progress.parameters), progress.gradients)
        loss_coefficients = next_loss_coefficients(
            before.loss_coefficients, kl=metrics.kl, entropy=metrics.entropy, settings=self._settings
        )
        updates = before.updates + 1
        self._reference.follow(progress.parameters, updates=updates)
        self._state = LearnerState(
            progress.optimizer, loss_coefficients, before.rate_factor, updates, replays=self._replays
        )
        self._set_parameters(progress.parameters)

    def _set_parameters(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.version += 1
        self.fingerprint = fingerprint(parameters)

    def roll_back(self, to: LearnerSnapshot, *, rate: float) -> None:
        """Return to an earlier moment, as a new version; later learning rates are multiplied by `rate`."""
        self._state = to.state._replace(rate_factor=self._state.rate_factor * rate)
        self._reference.restore(to.reference)
        self._set_parameters(to.parameters)

    def snapshot(self) -> LearnerSnapshot:
        """Return the learner at this moment, between two updates; from any thread."""
        return LearnerSnapshot(self.parameters, self._state, self._reference.arrays)

    def state(self) -> Arrays:
        """Name every array of the learner but the parameters, for a checkpoint; evaluated, and never changed later."""
        arrays = state_arrays(self._state)
        arrays |= {f"reference.{name}": array for name, array in self._reference.arrays.items()}
        mx.eval(arrays)
        return arrays

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Continue from the served parameters and the state that belongs to them.

        Raises ValueError, and changes nothing, if the state does not fit the trainable parameters.
        """
        own = {name: array for name, array in state.items() if not name.startswith("reference.")}
        restored = state_from_arrays(own, flat(self._policy.trainable()), self._settings, self.rule)
        self._reference.restore(with_prefix(state, "reference."))
        self._start_from_served()
        self._state = restored


def _require_replay(mode: RouterReplay, forcing: TeacherForcing) -> None:
    """Raise ModelError if routes have to be replayed, and the model cannot."""
    if mode == "on" and not forcing.can_replay:
        reason = "needs a model with experts whose routers choose with mx.argpartition"
        if not ROUTER_REPLAY.functions:
            reason = needs("router_replay")
        raise ModelError(f'learner.router_replay = "on" {reason}; choose "auto" or "off"')


def _per_completion(groups: Sequence[ScoredGroup], advantages: PerTokenAdvantages) -> tuple[tuple[float, ...], ...]:
    """Return the mean advantage of each completion of `groups`; those of replayed groups follow and are left out."""
    return tuple(
        tuple(float(a_T.sum()) / max(1, c.length) for c, a_T in zip(group.group.completions, rows, strict=True))
        for group, rows in zip(groups, advantages, strict=False)
    )


PATIENCE = 3
"""Number of updates after which the B matrix of an adapter must be different from zero."""


class AdapterCheck:
    """Raises if the B matrix of a LoRA adapter stays at its initial value, zero (arXiv:2106.09685, section 4.1).

    B is zero only until its first step. If B stays zero, the output of the adapter is zero and A has no gradient: the
    trained weights are not the served weights, or an array is lost between them. An adapter that has moved once is not
    checked again, so the check costs one reduction per B matrix in the first updates and nothing later.
    """

    def __init__(self, *, patience: int = PATIENCE) -> None:
        """patience: number of updates for which B may stay zero."""
        self._patience = patience
        self._updates = 0
        self._unmoved: dict[str, int] | None = None  # number of updates with a gradient, by name of B
        self._any_moved = False

    def check(self, parameters: Arrays, gradients: Arrays) -> None:
        """Check the result of an update that was applied.

        parameters: after the update. gradients: of its last optimizer step, by the same names. Raises AdapterError if
        after `patience` updates no B has moved, or if a B has not moved that had a gradient in as many updates (experts
        that no token was routed to have none). Evaluates arrays until all have moved.
        """
        if self._unmoved is None:
            self._unmoved = {name: 0 for name in parameters if name.endswith("lora_b")}
            self._any_moved = not self._unmoved
        if not self._unmoved:
            return
        self._updates += 1
        names = list(self._unmoved)
        moved_M = np.array(mx.stack([mx.any(parameters[name] != 0) for name in names]))
        has_gradient_M = np.array(mx.stack([mx.any(gradients[name] != 0) for name in names]))
        self._any_moved |= bool(moved_M.any())
        self._unmoved = {
            name: self._unmoved[name] + int(has_gradient)
            for name, moved, has_gradient in zip(names, moved_M, has_gradient_M, strict=True)
            if not moved
        }
        self._raise_if_stuck(self._unmoved)

    def _raise_if_stuck(self, unmoved: dict[str, int]) -> None:
        if not self._any_moved and self._updates >= self._patience:
            raise AdapterError(
                f"after {self._updates} updates the B matrix of every adapter is still exactly zero: training changes "
                "nothing. Please report this with the name of the model"
            )
        stuck = [name.removesuffix(".lora_b") for name, count in unmoved.items() if count >= self._patience]
        if stuck:
            raise AdapterError(
                f"{len(stuck)} adapter(s) had gradients in {self._patience} updates and their B matrix is still "
                f"exactly zero: {', '.join(stuck[:5])}. Exclude them with policy.method.target_modules, and please "
                "report this with the name of the model"
            )
