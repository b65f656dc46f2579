"""How far an update moved the policy: the earliest sign of one that destroys it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.models.parameters import Parameters
from clotho.models.policy import TrainablePolicy
from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import TrainingSequence, drawn_T, scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SamplingDistribution
from clotho.training.batch import MiniBatch, temperature_of
from clotho.training.gradient import reference_scores
from clotho.training.objectives.kl import MAX_LOG_RATIO
from protocols.rollout import ScoredGroup

COMPLETIONS = 32
"""So many completions of a mini-batch are looked at; with half as many a destructive update can look harmless."""


class _Looked(NamedTuple):
    sequence: TrainingSequence
    before_T: NDArray[np.float64]


def update_kl(
    groups: Sequence[ScoredGroup],
    mini: MiniBatch,
    before: Sequence[mx.array],
    *,
    policy: TrainablePolicy,
    forcing: TeacherForcing,
    after: Parameters,
    distribution: SamplingDistribution,
    budget: int,
) -> Generator[None, None, float]:
    """Estimate KL(before || after) in nats per token, by k3 on the tokens of a few completions of a mini-batch.

    before: log-probabilities of the tokens of its micro-batches, as the first gradient found them (with dropout, if
    there is any); after: parameters. The completions come evenly from its groups; their sampled tokens are taken as sampled
    by the policy before. budget: positions of a forward pass, as of a gradient's. Yields after each. Not finite where
    either policy's log-probabilities are not.
    """
    looked = _looked_at(groups, mini, before)
    total, tokens = 0.0, 0
    for micro in build_micro_batches([one.sequence for one in looked], layout=forcing.layout, budget=budget):
        with policy.using(after):
            after_N = np.array(reference_scores(forcing, micro, distribution), dtype=np.float64)
        yield
        before_N = np.concatenate([looked[member].before_T for member in micro.members])
        d_N = np.clip(after_N[: len(before_N)] - before_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        total += float(np.sum(np.expm1(d_N) - d_N))
        tokens += len(before_N)
    return total / tokens


def _looked_at(groups: Sequence[ScoredGroup], mini: MiniBatch, before: Sequence[mx.array]) -> list[_Looked]:
    everyone = sorted(
        (mini.places[member], m, b)
        for m, micro in enumerate(mini.micro_batches)
        for b, member in enumerate(micro.members)
    )
    looked = []
    for (group, i), m, b in everyone[:: -(-len(everyone) // COMPLETIONS)]:
        micro = mini.micro_batches[m]
        completion = groups[group].group.completions[i]
        sequence = scored_only(groups[group].group.prompt.tokens, completion.tokens)._replace(
            supports=completion.supports,
            drawn_T=drawn_T(completion),
            temperature=temperature_of(groups[group], i),
        )
        own_N = (micro.table.sequence_N == b) & (micro.table.weight_N > 0)
        before_T = np.array(before[m], dtype=np.float64)[own_N]
        looked.append(_Looked(sequence, before_T))
    return looked
