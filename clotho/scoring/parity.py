"""Do sampler and learner agree about the probability of the same tokens? They compute it in different ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from msgspec import Struct

from clotho.models.policy import TrainablePolicy
from clotho.scoring.head_scores import SamplingDistribution, token_scores
from clotho.scoring.teacher_forcing import TeacherForcing

ROWS = 2
"""Sequences decoded side by side: one alone can take another matrix kernel than a batch."""


class ParityReport(Struct, frozen=True, kw_only=True):
    """Absolute differences between both log-probabilities of the same tokens, in nats; not finite if either is not."""

    tokens: int
    max_difference: float
    mean_difference: float


class Decoder(Protocol):
    """What the probe needs of `clotho.inference.DecodeEngine`."""

    def teacher_forced_logits(self, prompt: Sequence[int], tokens: Sequence[int], *, rows: int) -> Iterator[mx.array]:
        """Compute the logits before each of `tokens`, (rows, V), as rows would that drew them."""


def probe(
    policy: TrainablePolicy,
    decoder: Decoder,
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    temperature: float,
    *,
    forcing: TeacherForcing | None = None,
) -> ParityReport:
    """Compare decoding, one token at a time, with teacher forcing, on the weights that the model computes with.

    temperature: 0 (greedy) is compared untempered. forcing: reuse one; by default the model is split anew.
    Both sequences must hold at least one token, else ValueError.
    """
    if not prompt_tokens or not completion_tokens:
        raise ValueError("parity needs at least one token of prompt and of completion")
    distribution = SamplingDistribution(temperature=temperature or 1.0)
    decoded_R_T = _decoded(decoder, prompt_tokens, completion_tokens, distribution)
    forcing = forcing or TeacherForcing(policy.model, policy.vocab_size)
    forced = forcing.sequence(prompt_tokens, completion_tokens, distribution=distribution)
    difference_R_T = np.abs(np.array(decoded_R_T, dtype=np.float64) - np.array(forced.logp_N, dtype=np.float64))
    return ParityReport(
        tokens=len(completion_tokens),
        max_difference=float(difference_R_T.max()),
        mean_difference=float(difference_R_T.mean()),
    )


def _decoded(
    decoder: Decoder, prompt: Sequence[int], completion: Sequence[int], distribution: SamplingDistribution
) -> mx.array:
    """Log-probabilities as decoding sees them, (ROWS, T) float32."""
    logits_T = decoder.teacher_forced_logits(prompt, completion, rows=ROWS)
    logp_T = [
        token_scores(logits_R_V, mx.full((ROWS,), token, dtype=mx.int32), distribution=distribution).logp_N
        for token, logits_R_V in zip(completion, logits_T, strict=True)
    ]
    return mx.stack(logp_T, axis=1)
