"""How far an update moves the policy: the earliest symptom of an update that destroys it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.parameters import Parameters
from clotho.models.policy import TrainablePolicy
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence, sampled_mask_T, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.training.batch import Minibatch, temperature_of
from clotho.training.gradient import compute_logprobs
from clotho.training.objectives.kl import MAX_LOG_RATIO
from clotho.training.turns import TurnBudget
from protocols.rollout import ScoredGroup

COMPLETIONS = 32
"""Number of completions to score; with half as many, a destructive update can go unnoticed."""


class _Sampled(NamedTuple):
    """A completion, and the log-probabilities of its sampled tokens before the update."""

    sequence: TrainingSequence
    before_T: NDArray[np.float64]


def update_kl(
    groups: Sequence[ScoredGroup],
    mini: Minibatch,
    before: Sequence[mx.array],
    *,
    policy: TrainablePolicy,
    forcing: TeacherForcing,
    after: Parameters,
    distribution: SamplingDistribution,
    micro_batch_tokens: int,
    turns: TurnBudget,
) -> Generator[None, None, float]:
    """Estimate KL(policy before || policy after) in nats per token, by k3 on some completions of a minibatch.

    before: log-probabilities of the tokens of its micro-batches at the weights before the update (with dropout, if
    there is any). after: parameters. The completions are spread evenly over the groups of the minibatch; their tokens
    stand for samples of the policy before the update. micro_batch_tokens: positions per forward pass. Yields after each
    pass. Not finite if either policy's log-probabilities are not finite.
    """
    sampled = _spread_completions(groups, mini, before)
    sequences = [one.sequence for one in sampled]
    total, tokens = 0.0, 0
    for micro in build_micro_batches(sequences, layout=forcing.layout, budget=micro_batch_tokens):
        logp_N = yield from compute_logprobs(
            policy, forcing, micro, distribution, computing=policy.using(after), turns=turns
        )
        after_N = np.array(logp_N, dtype=np.float64)
        yield from turns.pause()
        before_N = np.concatenate([sampled[member].before_T for member in micro.members])
        d_N = np.clip(after_N[: len(before_N)] - before_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        total += float(np.sum(np.expm1(d_N) - d_N))
        tokens += len(before_N)
    return total / tokens


def _spread_completions(groups: Sequence[ScoredGroup], mini: Minibatch, before: Sequence[mx.array]) -> list[_Sampled]:
    candidates = sorted(
        (mini.origins[member], m, b)
        for m, micro in enumerate(mini.micro_batches)
        for b, member in enumerate(micro.members)
    )
    sampled = []
    for (group, i), m, b in candidates[:: -(-len(candidates) // COMPLETIONS)]:
        micro = mini.micro_batches[m]
        completion = groups[group].group.completions[i]
        sequence = scored_only(groups[group].group.prompt.tokens, completion.tokens)._replace(
            supports=completion.supports,
            sampled_mask_T=sampled_mask_T(completion),
            temperature=temperature_of(groups[group], i),
        )
        own_N = (micro.table.sequence_N == b) & (micro.table.loss_mask_N > 0)
        before_T = np.array(before[m], dtype=np.float64)[own_N]
        sampled.append(_Sampled(sequence, before_T))
    return sampled
