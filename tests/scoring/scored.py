"""Scores of tokens that are given one by one, for comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from clotho.scoring.layouts.micro_batches import build_micro_batches
from clotho.scoring.sequences import scored_only
from clotho.scoring.teacher_forcing import TeacherForcing
from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, TokenScores, score


def token_scores(
    logits_N_V: mx.array, target_N: mx.array, *, distribution: SamplingDistribution, support_N_K: mx.array | None = None
) -> TokenScores:
    """Score targets without a teacher, all at the temperature of the distribution."""
    return score(logits_N_V, SampledTokens(target_N, support_N_K, distribution))


def sequence_scores(
    forcing: TeacherForcing, prompt: Sequence[int], tokens: Sequence[int], *, distribution: SamplingDistribution
) -> TokenScores:
    """Score the tokens after one prompt, (T,); neither may be empty."""
    (micro,) = build_micro_batches([scored_only(prompt, tokens)], layout=forcing.layout, budget=1)
    scores = forcing(micro, distribution=distribution)
    return TokenScores(scores.logp_N[: len(tokens)], scores.entropy_N[: len(tokens)])
