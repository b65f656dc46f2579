"""What runs measure of an update: how far it moves the policy, and the values of every token.

A large divergence is the earliest symptom of an update that destroys the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence, sampled_mask_T, scored_only
from clotho.training.batch import Minibatch, route_rows, temperature_of
from clotho.training.objectives.kl import MAX_LOG_RATIO
from clotho.training.optimizer_steps import TokenRecorder
from clotho.training.update import UpdateMeasure
from protocols.rollout import ScoredGroup
from protocols.step import Cut, TokenValues

if TYPE_CHECKING:
    import mlx.core as mx

    from clotho.models.parameters import Parameters
    from clotho.training.batch import TrainingBatch
    from clotho.training.gradient import LearnerModel, MicroBatchGradient

FIRST_STEPS, INTERVAL = 10, 8
"""The first steps, of which each is measured, and the interval between the measured ones that follow. A single
destructive update between them shows only in the rewards and lengths of the next batches."""

COMPLETIONS = 32
"""Number of completions to score; with half as many, a destructive update can go unnoticed."""


def limited_k3(d_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return exp(d) - 1 - d, and above d = 1 its tangent, for d = log(probability after / before). (N,) nats.

    The update was trained on the tokens that it is measured on. A rare one that it made probable has a large ratio,
    exp(d), and few of these would exceed all other tokens: the mean of k3 has a heavy tail. An update that destroys the
    policy makes its tokens improbable; there d is negative, and the value is that of k3.
    """
    bounded_N = np.minimum(d_N, 1.0)
    return np.expm1(bounded_N) - bounded_N + (np.e - 1.0) * (d_N - bounded_N)


class UpdateKl(UpdateMeasure):
    """Measures each of the first updates, and later some in a row of every `INTERVAL`: it takes a quarter of one."""

    def __init__(self, in_a_row: int) -> None:
        """in_a_row: how many; 0: none is due."""
        self._in_a_row = in_a_row

    def is_due(self, step: int) -> bool:
        """Whether the update of this step is measured."""
        return self._in_a_row > 0 and (step < FIRST_STEPS or step % INTERVAL < self._in_a_row)

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
        """Estimate KL(policy before || policy after) in nats per token, by `limited_k3` on completions of a minibatch.

        before: log-probabilities of the tokens of its micro-batches at the weights before the update (with dropout, if
        there is any). after: parameters. The completions are spread evenly over the groups of the minibatch; their
        tokens stand for samples of the policy before the update. micro_batch_tokens: positions per forward pass. Not
        finite if either policy's log-probabilities are not finite.
        """
        sequences, before_T = _spread_completions(groups, mini, before)
        total, tokens = 0.0, 0
        model.policy.use(after)
        replays = any(micro.routes is not None and micro.routes.replays for micro in mini.micro_batches)
        for micro in build_micro_batches(
            sequences, layout=model.forcing.layout, budget=micro_batch_tokens, replays=replays
        ):
            after_N = np.array(model.logprobs(micro), dtype=np.float64)
            model.turns.pause()
            before_N = np.concatenate([before_T[member] for member in micro.members])
            d_N = np.clip(after_N[: len(before_N)] - before_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
            total += float(np.sum(limited_k3(d_N)))
            tokens += len(before_N)
        return total / tokens


def _spread_completions(
    groups: Sequence[ScoredGroup], mini: Minibatch, before: Sequence[mx.array]
) -> tuple[list[TrainingSequence], list[NDArray[np.float64]]]:
    """Return completions, and the log-probabilities of their sampled tokens before the update."""
    candidates = sorted(
        (mini.origins[member], m, b)
        for m, micro in enumerate(mini.micro_batches)
        for b, member in enumerate(micro.members)
    )
    sequences, before_T = [], []
    for (group, i), m, b in candidates[:: -(-len(candidates) // COMPLETIONS)]:
        micro = mini.micro_batches[m]
        completion, prompt = groups[group].group.completions[i], groups[group].group.prompt.tokens
        sequences.append(
            scored_only(prompt, completion.tokens)._replace(
                supports=completion.supports,
                sampled_mask_T=sampled_mask_T(completion),
                temperature=temperature_of(groups[group], i),
                route_I_E=route_rows(prompt, completion),
            )
        )
        own_N = (micro.table.sequence_N == b) & (micro.table.loss_mask_N > 0)
        before_T.append(np.array(before[m], dtype=np.float64)[own_N])
    return sequences, before_T


class TokenRecord(TokenRecorder):
    """Collects the values of every token from the first gradient of an update that uses the token.

    Of each completion: log-probabilities, cuts, and absolute slopes of its trained tokens.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], list[NDArray[Any]]] = {}

    def add(self, mini: Minibatch, parts: Sequence[MicroBatchGradient]) -> None:
        """Add the tokens of a minibatch. parts: the gradients of its micro-batches, with `tokens`."""
        for micro, part in zip(mini.micro_batches, parts, strict=True):
            (found,) = part.tokens
            table = micro.table
            trained = int(np.count_nonzero(table.loss_mask_N))  # padding is at the end
            ends = np.cumsum(np.bincount(table.sequence_N[:trained], minlength=micro.sequences))[:-1]
            columns = (np.array(part.logp_N), np.array(found.cut_N), np.abs(np.array(found.slope_N)))
            split = zip(*(np.split(column_N[:trained], ends) for column_N in columns), strict=True)
            self._found |= {mini.origins[member]: list(own) for member, own in zip(micro.members, split, strict=True)}

    def values(self, groups: Sequence[ScoredGroup], batch: TrainingBatch) -> tuple[tuple[TokenValues, ...], ...]:
        """Return the values of each completion of the first groups of the update, in its little-endian form."""
        total = float(np.concatenate([slope_T for *_, slope_T in self._found.values()]).sum(dtype=np.float64))
        return tuple(
            tuple(
                _completion_values(group, i, batch.advantages[g][i], self._found.get((g, i)), total or 1.0)
                for i in range(len(group.rewards))
            )
            for g, group in enumerate(groups)
        )


def _completion_values(
    group: ScoredGroup, i: int, advantage_T: NDArray[np.float64], found: list[NDArray[Any]] | None, total: float
) -> TokenValues:
    """Return the values of a completion. found: of its trained tokens, if any. total: sum of all slopes."""
    completion = group.group.completions[i]
    T = len(completion.tokens)
    logp_T, share_T = np.full(T, np.nan, dtype="<f4"), np.zeros(T, dtype="<f4")
    cut_T = np.full(T, Cut.MASK, dtype=np.uint8)
    if found is not None:
        sampled_T = sampled_mask_T(completion)
        logp_T[sampled_T], cut_T[sampled_T], share_T[sampled_T] = found[0], found[1], found[2] / total
    if group.zero_advantage and group.zero_advantage[i]:
        cut_T[:] = Cut.MASK
    return TokenValues(
        learner_logprob=logp_T.tobytes(),
        advantage=advantage_T.astype("<f4").tobytes(),
        cut=cut_T.tobytes(),
        gradient_share=share_T.tobytes(),
    )
