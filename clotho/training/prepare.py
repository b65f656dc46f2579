"""What an update computes before its first gradient: reference log-probabilities, advantages and minibatches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.config.objectives import RatioObjective
from clotho.config.schema import LearnerSection
from clotho.config.sections_training import KLPenalty, RewardKLPenalty
from clotho.models.parameters import Parameters
from clotho.models.policy import TrainablePolicy
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.training.batch import MiniBatch, TokenAdvantages, compute_advantages, given_reference, mini_batches
from clotho.training.gradient import LossSettings, ReferenceLogprobs, reference_scores
from clotho.training.objectives.kl import ESTIMATORS
from clotho.training.reference_policy import ReferencePolicy
from protocols.rollout import ScoredGroup

Computing = Callable[[], AbstractContextManager[None]]
"""Opens a context in which the model computes as some policy."""

Scores = list[list[mx.array]]
"""Per minibatch and micro-batch: log-probabilities of its tokens, (N,)."""


class PreparedBatch(NamedTuple):
    """The minibatches of an update, the fixed log-probabilities of each micro-batch, and all advantages."""

    mini_batches: tuple[MiniBatch, ...]
    known: tuple[tuple[ReferenceLogprobs, ...], ...]
    advantages: TokenAdvantages

    @property
    def tokens(self) -> int:
        """Number of trained tokens, each counted once."""
        return sum(mini.tokens for mini in self.mini_batches)


def prepare(
    groups: Sequence[ScoredGroup],
    *,
    policy: TrainablePolicy,
    forcing: TeacherForcing,
    parameters: Parameters,
    reference: ReferencePolicy,
    rules: LossSettings,
    max_tokens: int,
    seed: Sequence[int],
) -> Generator[None, None, PreparedBatch]:
    """Prepare an update from `parameters`; yields between forward passes, with the served weights in the model.

    A KL penalty in the reward is the sum over a completion of the estimates for its tokens, with the sampler's log-
    probabilities as those of the policy; it is subtracted before advantages are computed. Reference log-probabilities
    that groups bring are used as they are.
    """
    settings = rules.settings

    def deal(token_advantages: TokenAdvantages) -> tuple[MiniBatch, ...]:
        return mini_batches(
            groups,
            token_advantages,
            settings=settings,
            max_tokens=max_tokens,
            layout=forcing.layout,
            seed=seed,
        )

    minis = deal(compute_advantages(groups, (), settings))
    references = _brought(minis) if given_reference(settings) else None
    if reference.needed:
        references = yield from _scored(minis, forcing, rules, reference.computing)
    in_reward = references is not None and isinstance(settings.kl_penalty, RewardKLPenalty)
    penalties = _penalties(groups, minis, references, rules) if in_reward and references else ()
    token_advantages = compute_advantages(groups, penalties, settings)
    if in_reward:
        minis = deal(token_advantages)
    proximals = None
    if _proximal_needed(settings, len(minis)):
        proximals = yield from _scored(minis, forcing, rules, lambda: policy.using(parameters))
    known = tuple(
        tuple(
            ReferenceLogprobs(references[m][k] if references else None, proximals[m][k] if proximals else None)
            for k in range(len(mini.micro_batches))
        )
        for m, mini in enumerate(minis)
    )
    return PreparedBatch(minis, known, token_advantages)


def _proximal_needed(settings: LearnerSection, minis: int) -> bool:
    """Whether a gradient will be computed at weights other than those at the start of the update."""
    several = settings.update_epochs * minis > 1
    chosen = settings.objective
    return several and isinstance(chosen, RatioObjective) and chosen.ratio_reference == "batch_start"


def _scored(
    minis: Sequence[MiniBatch], forcing: TeacherForcing, rules: LossSettings, computing: Computing
) -> Generator[None, None, Scores]:
    scores: Scores = []
    for mini in minis:
        scores.append([])
        for micro in mini.micro_batches:
            with computing():
                scores[-1].append(reference_scores(forcing, micro, rules.distribution))
            yield
    return scores


def _brought(minis: Sequence[MiniBatch]) -> Scores:
    tables = [[micro.table for micro in mini.micro_batches] for mini in minis]
    return [[mx.array(table.reference_N) for table in part if table.reference_N is not None] for part in tables]


def _penalties(
    groups: Sequence[ScoredGroup], minis: Sequence[MiniBatch], references: Scores, rules: LossSettings
) -> list[NDArray[np.float64]]:
    penalty = rules.settings.kl_penalty
    assert isinstance(penalty, KLPenalty)
    estimate = ESTIMATORS[penalty.estimator]
    penalties = [np.zeros(len(group.rewards)) for group in groups]
    for mini, scores in zip(minis, references, strict=True):
        for micro, reference_N in zip(mini.micro_batches, scores, strict=True):
            kl_N = np.array(estimate(mx.array(micro.table.rollout_logp_N), reference_N), dtype=np.float64)
            kl_B = np.bincount(micro.table.sequence_N, kl_N * micro.table.weight_N, minlength=micro.sequences)
            for member, kl in zip(micro.members, kl_B, strict=True):
                group, completion = mini.places[member]
                penalties[group][completion] = rules.loss_coefficients.kl_beta * kl
    return penalties
