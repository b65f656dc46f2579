"""The critic: its model, and what it does with a batch: values, advantage estimation, and its own update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.critic.sections import ValueHead
from clotho.models.parameters import Arrays, flat, nested
from clotho.models.policy import Policy
from clotho.models.turns import TurnBudget
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import MicroBatch, sampled_mask_T, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.settings.learner import AdamW, LearnerSection
from clotho.training.batch import Division, Minibatch
from clotho.training.learner_state import with_prefix
from clotho.training.optimizers import (
    OptimizerState,
    apply_step,
    clip_scale,
    global_norm,
    initial_state,
    state_arrays,
    state_from_arrays,
)
from protocols.checkpoint import Part
from protocols.rollout import ScoredGroup
from training_run.supervision.hooks import UpdateHook

TRUNK, HEAD, BIAS = "trunk.", "head.weight", "head.bias"
OPTIMIZER = "optimizer."

RATE_OF_POLICY = 3.0
"""Default learning rate of the critic by that of the policy."""


def value_loss(
    value_N: mx.array, before_N: mx.array, return_N: mx.array, weight_N: mx.array, *, value_clip: float
) -> mx.array:
    """Return the clipped value loss: sum_t c_t max((V_t - R_t)^2, (clip(V_t, V'_t - e, V'_t + e) - R_t)^2) / 2.

    V' is the value at the start of the batch, e is `value_clip`; 0: no clip. As in the code of PPO (arXiv:1707.06347;
    baselines, ppo2). weight_N: c, 0 for padding. All (N,) float32.
    """
    error_N = mx.square(value_N - return_N)
    if value_clip > 0:
        near_N = before_N + mx.clip(value_N - before_N, -value_clip, value_clip)
        error_N = mx.maximum(error_N, mx.square(near_N - return_N))
    return 0.5 * mx.sum(weight_N * error_N)


class ValueModel:
    """Computes values and learns them. It belongs to the learner's thread.

    The trunk begins as the policy of the start of the run, and the head with zeros, so that all values are 0 at first.
    """

    def __init__(self, policy: Policy, settings: ValueHead, learner: LearnerSection, turns: TurnBudget) -> None:
        """Raises ModelError if blocks and head of the model cannot be separated."""
        self._model, self._settings, self._turns = policy.copy_model(), settings, turns
        self._rate = settings.learning_rate or RATE_OF_POLICY * learner.optimizer.highest_rate
        self._learner = replace(learner, optimizer=AdamW(learning_rate=self._rate), lora_plus=1.0)
        self._forcing = TeacherForcing(self._model.model, self._model.vocab_size, layout=learner.layout)
        self.layout = self._forcing.layout
        width = self._width()
        trunk = {f"{TRUNK}{name}": array for name, array in flat(policy.trainable()).items()}
        self._parameters: Arrays = trunk | {HEAD: mx.zeros((width,)), BIAS: mx.zeros((1,))}
        self._optimizer: OptimizerState = initial_state(self._parameters, self._learner)

    def values(self, micro: MicroBatch) -> mx.array:
        """Return the value of the state before each token of the table: (N,) float32, evaluated."""
        with self._turns.recorded(self._model.model, gradients=False) as stages:
            value_N = self._value_N(self._parameters, micro)
        self._turns.evaluate(stages.take(), value_N)
        return value_N

    def gradient(
        self, micro: MicroBatch, before_N: mx.array, return_N: mx.array, weight_N: mx.array
    ) -> tuple[mx.array, Arrays]:
        """Return the value loss of a micro-batch and its gradient by parameter name, evaluated."""

        def loss(arrays: Arrays) -> mx.array:
            value_N = self._value_N(arrays, micro)
            return value_loss(value_N, before_N, return_N, weight_N, value_clip=self._settings.value_clip)

        try:
            with self._model.training_mode(), self._turns.recorded(self._model.model, gradients=True) as stages:
                value, arrays = mx.value_and_grad(loss)(dict(self._parameters))
        finally:
            self._use(self._parameters)
        gradient = {name: array.astype(mx.float32) for name, array in arrays.items()}
        self._turns.evaluate(stages.take(gradient), (gradient, value))
        return value, gradient

    def step(self, gradient: Arrays) -> bool:
        """Take an optimizer step, whose gradient is clipped to `learner.max_grad_norm`; False if it is not finite."""
        norm = float(np.array(global_norm(gradient)))
        if not norm < inf:
            return False
        self._parameters, self._optimizer = apply_step(
            self._parameters,
            gradient,
            self._optimizer,
            learning_rate=self._rate,
            scale=clip_scale(norm, self._learner.max_grad_norm),
            settings=self._learner,
        )
        mx.eval(self._parameters, self._optimizer)
        return True

    def release(self) -> None:
        """Let the modules refer to no parameters until the next computation."""
        self._model.release()

    def arrays(self) -> Arrays:
        """Name all arrays for a checkpoint; evaluated, and never changed later."""
        named = self._parameters | {f"{OPTIMIZER}{name}": one for name, one in state_arrays(self._optimizer).items()}
        mx.eval(named)
        return named

    def restore(self, arrays: Mapping[str, mx.array]) -> None:
        """Restore what `arrays` named. Raises ValueError, and changes nothing, if it does not fit the policy."""
        shapes = {name: array.shape for name, array in arrays.items() if not name.startswith(OPTIMIZER)}
        if shapes != {name: array.shape for name, array in self._parameters.items()}:
            raise ValueError("the critic of the checkpoint does not fit the trainable parameters")
        self._optimizer = state_from_arrays(with_prefix(arrays, OPTIMIZER), self._parameters, self._learner)
        self._parameters = {name: arrays[name] for name in self._parameters}  # sums of the norm keep their order

    def _width(self) -> int:
        (micro,) = build_micro_batches([scored_only((0,), (0,))], layout="padded", budget=2)
        return int(self._forcing.hidden(micro).shape[-1])

    def _value_N(self, arrays: Arrays, micro: MicroBatch) -> mx.array:
        self._use(arrays)
        hidden_N_D = self._forcing.hidden(micro).astype(mx.float32)
        return hidden_N_D @ arrays[HEAD] + arrays[BIAS]

    def _use(self, arrays: Arrays) -> None:
        self._model.use(nested(with_prefix(arrays, TRUNK)))


Array = NDArray[np.float64]


def generalized_advantages(value_T: Array, reward: float, *, discount: float, gae_lambda: float) -> Array:
    """Return the advantage of each token: (T,) float64.

    A_t = sum_k (gamma lambda)^k d_{t+k}, d_t = r_t + gamma V_{t+1} - V_t: GAE (arXiv:1506.02438), equation 16. The
    reward is that of the last token, after which the value is 0. value_T: V_t, of the state before token t.
    """
    advantage_T = np.empty_like(value_T)
    later, following = 0.0, 0.0
    for t in reversed(range(len(value_T))):
        earned = reward if t == len(value_T) - 1 else 0.0
        later = earned + discount * following - value_T[t] + discount * gae_lambda * later
        advantage_T[t], following = later, value_T[t]
    return advantage_T


def normalized(rows: Sequence[Array]) -> list[Array]:
    """Return the advantages less their mean, divided by their standard deviation (plus 1e-8), over all tokens."""
    whole_M = np.concatenate(rows) if rows else np.empty(0)
    mean, deviation = (float(whole_M.mean()), float(whole_M.std())) if whole_M.size else (0.0, 0.0)
    return [(row_T - mean) / (deviation + 1e-8) for row_T in rows]


def explained_variance(value_M: Array, return_M: Array) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 for exact values, 0 for a constant, below 0 for worse ones.

    None if all returns are equal.
    """
    variance = float(return_M.var()) if return_M.size else 0.0
    return 1.0 - float((return_M - value_M).var()) / variance if variance > 0 else None


NAME = "critic"
"""Name of the part in checkpoints."""


class CriticState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of the critic beside its arrays. batches: number of batches that it has learned."""

    batches: int = 0


class _Judged(NamedTuple):
    """A micro-batch with its values before the critic learns, and the targets of its tokens; padding has weight 0."""

    micro: MicroBatch
    value_N: mx.array
    return_N: mx.array


class CriticUpdates(UpdateHook):
    """Gives the tokens of every batch their advantages by the values of the critic, which then learns the returns."""

    def __init__(
        self, model: ValueModel, settings: ValueHead, learner: LearnerSection, *, max_tokens: int, turns: TurnBudget
    ) -> None:
        """learner, max_tokens: settings of the run. turns: those of `model`."""
        self._model, self._settings, self._max_tokens, self._turns = model, settings, max_tokens, turns
        self._learner = replace(learner, num_minibatches=1)
        self._batches, self._arrays = 0, model.arrays()
        self._metrics: dict[str, float | None] = {}

    def judged(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Return the groups with advantages per token, and learn their returns; in the learner's thread.

        In the first `warmup_steps` batches the groups stay as they are. The advantages are those of the values before
        the critic learns the batch.
        """
        self._turns.begin()
        try:
            found, advantages = self._assessed(groups, self._dealt(groups))
            loss = self._learn(found) if found else None
        finally:
            self._model.release()
        values, returns = (
            np.concatenate([_trained(one.micro, getattr(one, name)) for one in found]) if found else np.empty(0)
            for name in ("value_N", "return_N")
        )
        self._metrics = {
            "critic/value_loss": loss,
            "critic/explained_variance": explained_variance(values, returns),
            "critic/mean_value": float(values.mean()) if values.size else None,
        }
        self._batches, self._arrays = self._batches + 1, self._model.arrays()
        if self._batches <= self._settings.warmup_steps:
            return groups
        return [_with_advantages(group, g, advantages) for g, group in enumerate(groups)]

    def metrics(self) -> Mapping[str, Any]:
        """Return the values of the last batch."""
        found, self._metrics = self._metrics, {}
        return found

    def part(self) -> Part[object]:
        """Return what the next checkpoint keeps."""
        return Part(value=CriticState(batches=self._batches), arrays=self._arrays)

    def restore(self, saved: Part[CriticState]) -> None:
        """Continue from what `part` returned. Raises ValueError if it does not fit the policy."""
        self._model.restore(saved.arrays)
        self._batches, self._arrays = saved.value.batches, self._model.arrays()

    def _dealt(self, groups: Sequence[ScoredGroup]) -> Minibatch | None:
        none = [[np.zeros(len(one.tokens)) for one in group.group.completions] for group in groups]
        plain = [replace(group, token_advantages=(), teacher=(), teacher_logprobs=()) for group in groups]
        minis = Division(self._learner, self._max_tokens, self._model.layout).minibatches(plain, none)
        return minis[0] if minis else None

    def _assessed(
        self, groups: Sequence[ScoredGroup], mini: Minibatch | None
    ) -> tuple[list[_Judged], dict[tuple[int, int], Array]]:
        """Return the micro-batches with their targets, and the advantages of each completion's sampled tokens."""
        found: list[_Judged] = []
        advantages: dict[tuple[int, int], Array] = {}
        for micro in mini.micro_batches if mini is not None else ():
            value_N = self._model.values(micro)
            row_N, return_N = np.array(value_N, dtype=np.float64), np.zeros(value_N.shape[0])
            for at, member in enumerate(micro.members):
                assert mini is not None
                g, i = mini.origins[member]
                index_T = np.flatnonzero((micro.table.sequence_N == at) & (micro.table.loss_mask_N > 0))
                advantages[g, i] = generalized_advantages(
                    row_N[index_T],
                    groups[g].rewards[i],
                    discount=self._settings.discount,
                    gae_lambda=self._settings.gae_lambda,
                )
                return_N[index_T] = advantages[g, i] + row_N[index_T]
            found.append(_Judged(micro, value_N, mx.array(return_N.astype(np.float32))))
            self._turns.pause()
        if self._settings.normalize:
            advantages = dict(zip(advantages, normalized(list(advantages.values())), strict=True))
        return found, advantages

    def _learn(self, batch: Sequence[_Judged]) -> float:
        """Take the optimizer steps of the critic; return the mean loss of a token before the first one."""
        tokens = sum(int(one.micro.table.loss_mask_N.sum()) for one in batch)
        first = 0.0
        for epoch in range(self._settings.epochs):
            total: Arrays = {}
            for one in batch:
                weight_N = mx.array(one.micro.table.loss_mask_N / tokens)
                loss, gradient = self._model.gradient(one.micro, one.value_N, one.return_N, weight_N)
                total = {name: total[name] + array for name, array in gradient.items()} if total else gradient
                mx.eval(total)
                first += float(np.array(loss)) if epoch == 0 else 0.0
                self._turns.pause()
            if not self._model.step(total):
                break
        return first


def _trained(micro: MicroBatch, row_N: mx.array) -> NDArray[np.float64]:
    return np.array(row_N, dtype=np.float64)[micro.table.loss_mask_N > 0]


def _with_advantages(group: ScoredGroup, g: int, advantages: Mapping[tuple[int, int], Array]) -> ScoredGroup:
    """Return the group with advantages of its sampled tokens; completions that are not trained on have zeros."""
    rows = []
    for i, completion in enumerate(group.group.completions):
        row_T = np.zeros(len(completion.tokens))
        if (g, i) in advantages:
            row_T[sampled_mask_T(completion)] = advantages[g, i]
        rows.append(tuple(row_T.tolist()))
    return replace(group, token_advantages=tuple(rows))
