"""What the critic does with a batch: values, advantages of the policy, and its own update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.critic.gae import Array, explained_variance, generalized_advantages, normalized
from attachments.critic.sections import ValueHead
from attachments.critic.value_model import ValueModel
from clotho.models.parameters import Arrays
from clotho.models.turns import TurnBudget
from clotho.scoring.sequences import MicroBatch, sampled_mask_T
from clotho.settings.learner import LearnerSection
from clotho.training.batch import Division, Minibatch
from protocols.checkpoint import Part
from protocols.rollout import ScoredGroup
from training_run.supervision.hooks import UpdateHook

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
