"""One policy update: optimizer steps over a batch, leaving the compute thread in between; all or nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from clotho.config.schema import LearnerSection, SamplingSection
from clotho.models.machine import random_state, restore_random_state
from clotho.models.parameters import Arrays, Parameters, fingerprint, flat
from clotho.models.policy import TrainablePolicy
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.training.adapter_check import AdapterWatch
from clotho.training.batch import TokenAdvantages
from clotho.training.gradient import LossSettings
from clotho.training.objectives.controllers import initial_loss_coefficients, next_loss_coefficients
from clotho.training.objectives.registry import objective
from clotho.training.optimizer_steps import OptimizerProgress, Tally, optimize
from clotho.training.optimizers import initial_state
from clotho.training.prepare import PreparedBatch, prepare
from clotho.training.reference_policy import ReferencePolicy
from clotho.training.rollback import GoodPolicy, LearnerState, Snapshot, part, state_arrays, state_from_arrays
from clotho.training.schedule import learning_rate
from clotho.training.update_kl import update_kl
from protocols.rollout import ScoredGroup
from protocols.sampling import require_learnable
from protocols.step import UpdateMetrics


class Update(Struct, frozen=True, kw_only=True):
    """What one update made; nothing serves it before it is published.

    parameters, version, fingerprint: the newest weights; those before where nothing was applied.
    advantages: per group, of each completion (the mean over the tokens that the policy drew). applied: whether a step
    was taken. finite: False where it was not because loss or gradient were not finite; not applied but finite means
    that the gradient was exactly zero.
    """

    parameters: Parameters
    version: int
    fingerprint: str
    metrics: UpdateMetrics
    advantages: tuple[tuple[float, ...], ...]
    applied: bool
    finite: bool


class _Computed(NamedTuple):
    """What an update is made of; `moved` is None where loss or gradient were not finite."""

    batch: PreparedBatch
    moved: OptimizerProgress | None
    metrics: UpdateMetrics


class PolicyLearner:
    """Holds the newest parameters and all that learning carries from update to update; `update` moves all or nothing.

    The newest parameters need not be served yet: the next update starts from them all the same.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        learner: LearnerSection,
        sampling: SamplingSection,
        *,
        steps: int,
        seed: int = 0,
        good_window: int = 0,
        watched: bool = False,
    ) -> None:
        """Start from the served parameters. `steps` is the length of the schedule; `seed` deals mini-batches.

        good_window: healthy updates that prove a policy good, so that `roll_back` can go back to it; 0 = keep none.
        watched: measure how far each update moves the policy.
        Raises ProfileError where the sampled distribution is not one that the learner can evaluate, and for an
        objective that cannot be loaded; ModelError where the layout cannot be honoured.
        """
        require_learnable(sampling)
        self._policy, self._settings, self._steps, self._seed = policy, learner, steps, seed
        self._max_tokens, self._watched = sampling.max_tokens, watched
        self._law = SamplingDistribution(sampling.temperature, sampling.logit_bias)
        self._objective = objective(learner.objective)
        self._forcing = TeacherForcing(policy.model, policy.vocab_size, layout=learner.layout)
        self._reference = ReferencePolicy(policy, learner)
        self._adapter_watch = AdapterWatch()
        self._adopt_served()
        self._state = LearnerState(
            optimizer=initial_state(flat(self.parameters), learner),
            loss_coefficients=initial_loss_coefficients(learner),
        )
        self._good = GoodPolicy(self._snapshot(), window=good_window) if good_window else None

    def _adopt_served(self) -> None:
        self.parameters = self._policy.trainable()
        self.version = self._policy.version
        self.fingerprint = self._policy.fingerprint

    def update(
        self, groups: Sequence[ScoredGroup], *, step: int | None = None, replayed: Sequence[ScoredGroup] = ()
    ) -> Generator[None, None, Update]:
        """Learn from a batch of groups; yields after every pass, with the served weights in the model.

        step: batches consumed before this one, which places the update in the schedule; by default the updates applied.
        replayed: groups to learn from beside them. A generator that is closed early changes nothing. Raises ValueError
        if the policy drew no token.
        """
        step = self._state.updates if step is None else step
        batch, moved, metrics = yield from self._compute([*groups, *replayed], step)
        if moved is not None and metrics.applied:
            self._adopt(moved, metrics)
        return Update(
            parameters=self.parameters,
            version=self.version,
            fingerprint=self.fingerprint,
            metrics=metrics,
            advantages=_of_completions(groups, batch.advantages),
            applied=metrics.applied,
            finite=moved is not None,
        )

    def rehearse(self, groups: Sequence[ScoredGroup]) -> None:
        """Compute the first update from such groups, and keep nothing of it, nor of the random numbers it draws."""
        before = random_state()
        try:
            for _ in self._compute(groups, 0):
                pass
        finally:
            restore_random_state(before)

    def _compute(self, groups: Sequence[ScoredGroup], step: int) -> Generator[None, None, _Computed]:
        """All of an update but making its outcome the learner's own."""
        rules = LossSettings(self._settings, self._objective, self._law, self._state.loss_coefficients)
        batch = yield from prepare(
            groups,
            policy=self._policy,
            forcing=self._forcing,
            parameters=self.parameters,
            reference=self._reference,
            rules=rules,
            max_tokens=self._max_tokens,
            seed=(self._seed, step),
        )
        rate = learning_rate(step, steps=self._steps, settings=self._settings) * self._state.rate_factor
        tally = Tally()
        moved = yield from optimize(
            batch,
            OptimizerProgress(self.parameters, self._state.optimizer, 0, {}, ()),
            policy=self._policy,
            forcing=self._forcing,
            rules=rules,
            version=self.version,
            rate=rate,
            tally=tally,
        )
        steps = moved.steps if moved is not None else 0
        metrics = tally.metrics(tokens=batch.tokens, rate=rate, loss_coefficients=rules.loss_coefficients, steps=steps)
        if moved is not None and metrics.applied and self._watched:
            metrics = replace(metrics, step_kl=(yield from self._step_kl(groups, batch, moved)))
        return _Computed(batch, moved, metrics)

    def _step_kl(
        self, groups: Sequence[ScoredGroup], batch: PreparedBatch, moved: OptimizerProgress
    ) -> Generator[None, None, float]:
        nats: float = yield from update_kl(
            groups,
            batch.mini_batches[0],
            moved.start,
            policy=self._policy,
            forcing=self._forcing,
            after=moved.parameters,
            distribution=self._law,
            budget=self._settings.micro_batch_tokens,
        )
        return nats

    def _adopt(self, moved: OptimizerProgress, metrics: UpdateMetrics) -> None:
        """Make the result of an update the learner's own."""
        before = self._state
        self._adapter_watch.observe(flat(moved.parameters), moved.gradients)
        loss_coefficients = next_loss_coefficients(
            before.loss_coefficients, kl=metrics.kl, entropy=metrics.entropy, settings=self._settings
        )
        updates = before.updates + 1
        self._reference.follow(moved.parameters, updates=updates)
        self._state = LearnerState(moved.optimizer, loss_coefficients, before.rate_factor, updates)
        self._become(moved.parameters)

    def _become(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.version += 1
        self.fingerprint = fingerprint(parameters)

    def observe_health(self, *, healthy: bool) -> None:
        """Tell the learner how the batch of its newest update looked, so that it knows what is good to go back to."""
        if self._good is not None:
            self._good.observe(self._snapshot(), healthy=healthy)

    def roll_back(self, *, rate: float) -> None:
        """Go back to the last good policy, as a new version, and learn on at `rate` times the learning rate."""
        if self._good is None:
            raise RuntimeError("this learner keeps no policy to go back to")
        good = self._good.go_back()
        self._state = good.state._replace(rate_factor=self._state.rate_factor * rate)
        self._reference.restore(good.reference)
        self._become(good.parameters)

    def _snapshot(self) -> Snapshot:
        return Snapshot(self.parameters, self._state, self._reference.arrays())

    def state(self) -> Arrays:
        """Name every array of the learner but the parameters, for a checkpoint; evaluated, and never changed later."""
        arrays = state_arrays(self._state)
        arrays |= {f"reference.{name}": array for name, array in self._reference.arrays().items()}
        if self._good is not None:
            arrays |= {f"rollback.{name}": array for name, array in self._good.arrays().items()}
        mx.eval(arrays)
        return arrays

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Continue from the served parameters of the policy and the state that belongs to them.

        Raises ValueError, and changes nothing, where the state does not fit the trainable parameters.
        """
        own = {name: array for name, array in state.items() if not name.startswith(("reference.", "rollback."))}
        restored = state_from_arrays(own, flat(self._policy.trainable()), self._settings)
        self._reference.restore(part(state, "reference."))
        self._adopt_served()
        self._state = restored
        if self._good is not None:
            good = part(state, "rollback.")
            self._good = GoodPolicy(self._snapshot(), window=self._good.window)  # where it was not kept before
            if good:
                self._good.restore(good, self._settings)


def _of_completions(groups: Sequence[ScoredGroup], advantages: TokenAdvantages) -> tuple[tuple[float, ...], ...]:
    """Of the groups alone, which come before the replayed ones; tokens that were not sampled have 0."""
    return tuple(
        tuple(float(a_T.sum()) / max(1, c.length) for c, a_T in zip(group.group.completions, rows, strict=True))
        for group, rows in zip(groups, advantages, strict=False)
    )
