"""One policy update, in micro-batches that leave the compute thread in between, and all or nothing."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence

import mlx.core as mx
import numpy as np
from msgspec import Struct

from actors.compute.advantages import group_relative
from actors.compute.batch import build_batch
from actors.compute.fingerprint import fingerprint
from actors.compute.gradient import Gradient, LearnablePolicy, micro_gradient
from actors.compute.logprobs import TeacherForcing
from actors.compute.objective import TokenSums
from actors.compute.optimizer import adamw, clip_scale, global_norm, initial_state, state_arrays, state_from_arrays
from actors.compute.schedule import learning_rate
from actors.compute.trees import Parameters, flat, nested
from protocols.errors import ProfileError
from protocols.profile import LearnerSection, SamplingSection
from protocols.score import ScoredGroup
from protocols.step import UpdateMetrics


class Update(Struct, frozen=True, kw_only=True):
    """What one update made; nothing serves it before it is published.

    parameters, version, fingerprint: the newest weights; those before where nothing was applied.
    advantages: per group, of each completion. applied: whether a step was taken. finite: False where it was not
    because loss or gradient were not finite; not applied but finite means that the gradient was exactly zero.
    """

    parameters: Parameters
    version: int
    fingerprint: str
    metrics: UpdateMetrics
    advantages: tuple[tuple[float, ...], ...]
    applied: bool
    finite: bool


class PolicyLearner:
    """Holds the newest parameters and the optimizer's state; `update` moves both, or neither.

    The newest parameters need not be served yet: the next update starts from them all the same.
    """

    def __init__(
        self, policy: LearnablePolicy, learner: LearnerSection, sampling: SamplingSection, *, steps: int
    ) -> None:
        """Start from the served parameters. `steps` is the length of the learning-rate schedule.

        Raises ProfileError where the sampled distribution is not the one that the learner can evaluate.
        """
        require_learnable(sampling)
        self._policy = policy
        self._settings = learner
        self._temperature = sampling.temperature
        self._steps = steps
        self._forcing = TeacherForcing(policy.model, policy.vocab_size)
        self._adopt_served()
        self._optimizer = initial_state(flat(self.parameters))

    def _adopt_served(self) -> None:
        self.parameters = self._policy.trainable()
        self.version = self._policy.version
        self.fingerprint = self._policy.fingerprint

    def update(self, groups: Sequence[ScoredGroup], *, step: int | None = None) -> Generator[None, None, Update]:
        """Learn from a batch of groups; yields after every micro-batch, with the served weights in the model.

        step: batches consumed before this one, which places the update in the schedule; by default the updates applied.
        A generator that is closed early changes nothing. Raises ValueError if there is no completion token.
        """
        settings = self._settings
        advantages = [group_relative(g.rewards, epsilon=settings.advantage_epsilon).tolist() for g in groups]
        batch = build_batch(groups, advantages, budget=settings.micro_batch_tokens)
        total: Gradient | None = None
        for micro in batch.micro_batches:
            part = micro_gradient(
                self._policy,
                self._forcing,
                self.parameters,
                micro,
                settings=settings,
                temperature=self._temperature,
                learner_version=self.version,
                total_tokens=batch.tokens,
            )
            total = part if total is None else _add(total, part)
            yield
        assert total is not None
        fresh = sum(int(((m.version_N == self.version) * m.weight_N).sum()) for m in batch.micro_batches)
        rate = learning_rate(self._optimizer.step if step is None else step, steps=self._steps, settings=settings)
        norm = float(np.array(global_norm(total.arrays)))
        sums = TokenSums(*np.array(total.sums).tolist())
        finite = math.isfinite(norm) and math.isfinite(float(sums.loss))
        applied = finite and norm > 0.0
        if applied:
            self._apply(total.arrays, rate=rate, scale=clip_scale(norm, settings.max_grad_norm))
        return Update(
            parameters=self.parameters,
            version=self.version,
            fingerprint=self.fingerprint,
            metrics=_metrics(sums, tokens=batch.tokens, fresh=fresh, norm=norm, rate=rate, applied=applied),
            advantages=tuple(tuple(a) for a in advantages),
            applied=applied,
            finite=finite,
        )

    def _apply(self, gradients: dict[str, mx.array], *, rate: float, scale: float) -> None:
        parameters, optimizer = adamw(
            flat(self.parameters), gradients, self._optimizer, learning_rate=rate, scale=scale, s=self._settings
        )
        mx.eval(parameters, optimizer.first, optimizer.second, optimizer.master)
        self.parameters, self._optimizer = nested(parameters), optimizer
        self.version += 1
        self.fingerprint = fingerprint(self.parameters)

    def state(self) -> dict[str, mx.array]:
        """Name every array of the optimizer's state, for a checkpoint; evaluated, and never changed later."""
        arrays = state_arrays(self._optimizer)
        mx.eval(arrays)
        return arrays

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Continue from the served parameters of the policy and the state that belongs to them.

        Raises ValueError, and changes nothing, where the state does not fit the trainable parameters.
        """
        self._optimizer = state_from_arrays(dict(state), flat(self._policy.trainable()))
        self._adopt_served()


def require_learnable(sampling: SamplingSection) -> None:
    """Refuse, with ProfileError, sampling whose log-probabilities the learner would evaluate under another law."""
    if sampling.temperature == 0.0:
        raise ProfileError("sampling.temperature = 0 is greedy: groups would be equal and nothing could be learnt")
    neutral = SamplingSection()
    for key in ("top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"):
        if getattr(sampling, key) != getattr(neutral, key):
            raise ProfileError(
                f"sampling.{key} = {getattr(sampling, key)}: the learner evaluates softmax(logits / temperature) "
                f"alone; leave it at {getattr(neutral, key)}"
            )


def _add(total: Gradient, part: Gradient) -> Gradient:
    added = Gradient({n: g + part.arrays[n] for n, g in total.arrays.items()}, total.sums + part.sums)
    mx.eval(added)
    return added


def _metrics(sums: TokenSums, *, tokens: int, fresh: int, norm: float, rate: float, applied: bool) -> UpdateMetrics:
    return UpdateMetrics(
        loss=float(sums.loss) / tokens,
        kl=float(sums.kl) / tokens,
        entropy=float(sums.entropy) / tokens,
        clip_fraction=float(sums.clipped) / tokens,
        mismatch_kl=float(sums.mismatch) / fresh if fresh else 0.0,
        ratio_mean=float(sums.ratio) / tokens,
        grad_norm=norm,
        learning_rate=rate,
        tokens=tokens,
        applied=applied,
    )
