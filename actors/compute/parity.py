"""Do sampler and learner agree about the probability of the same tokens? They compute it in different ways."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct

from actors.compute.gradient import LearnablePolicy
from actors.compute.head_scores import SampledLaw, token_scores
from actors.compute.logprobs import TeacherForcing

ROWS = 2
"""Sequences decoded side by side: one alone can take another matrix kernel than a batch."""


class ParityReport(Struct, frozen=True, kw_only=True):
    """Absolute differences between both log-probabilities of the same tokens, in nats; not finite if either is not."""

    tokens: int
    max_difference: float
    mean_difference: float


def probe(
    policy: LearnablePolicy,
    prompt_tokens: Sequence[int],
    completion_tokens: Sequence[int],
    temperature: float,
    *,
    forcing: TeacherForcing | None = None,
) -> ParityReport:
    """Compare cached decoding, one token at a time, with teacher forcing, on the weights that the model computes with.

    temperature: 0 (greedy) is compared untempered. forcing: reuse one; by default the model is split anew.
    Both sequences must hold at least one token, else ValueError.
    """
    if not prompt_tokens or not completion_tokens:
        raise ValueError("parity needs at least one token of prompt and of completion")
    law = SampledLaw(temperature=temperature or 1.0)
    cached_R_T = _decoded(policy.model, prompt_tokens, completion_tokens, law)
    forcing = forcing or TeacherForcing(policy.model, policy.vocab_size)
    forced = forcing.sequence(prompt_tokens, completion_tokens, law=law)
    difference_R_T = np.abs(np.array(cached_R_T, dtype=np.float64) - np.array(forced.logp_N, dtype=np.float64))
    return ParityReport(
        tokens=len(completion_tokens),
        max_difference=float(difference_R_T.max()),
        mean_difference=float(difference_R_T.mean()),
    )


def _decoded(model: nn.Module, prompt: Sequence[int], completion: Sequence[int], law: SampledLaw) -> mx.array:
    """Log-probabilities as decoding sees them: prompt at once, then given tokens one by one. (ROWS, T) float32."""
    cache = make_prompt_cache(model)
    inputs_R_S = mx.array([list(prompt)] * ROWS)
    logp_T = []
    for token in completion:
        target_R = mx.full((ROWS,), token, dtype=mx.int32)
        logp_T.append(token_scores(model(inputs_R_S, cache=cache)[:, -1], target_R, law=law).logp_N)
        mx.eval(logp_T[-1])
        inputs_R_S = target_R[:, None]
    return mx.stack(logp_T, axis=1)
