"""Log-probabilities of the tokens of a prompt under the served policy, one chunk per turn of the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from clotho.inference.cache_layout import evaluation_mode
from clotho.models.parameters import Parameters
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.head_scores import rows_at_once
from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, scoring
from protocols.errors import GenerationError
from protocols.sampling import PromptLogprobs

MODEL_DISTRIBUTION = SamplingDistribution(temperature=1.0)
Alternatives = tuple[tuple[int, float], ...]


class ScoredPolicy(Protocol):
    """The part of a policy or of a base model that scores prompts."""

    @property
    def model(self) -> nn.Module:
        """The model as mlx-lm builds it."""

    @property
    def version(self) -> int:
        """The served version."""

    @property
    def vocab_size(self) -> int:
        """Number of logits."""

    def trainable(self) -> Parameters:
        """Return the tree of the served trainable parameters."""

    def using(self, parameters: Parameters, /) -> AbstractContextManager[None]:
        """Compute with these parameters inside the context."""


def prompt_logprobs(
    policy: ScoredPolicy,
    tokens: Sequence[int],
    *,
    top: int,
    chunk: int,
    distribution: SamplingDistribution = MODEL_DISTRIBUTION,
    computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    turns: TurnBudget = UNDIVIDED,
) -> Generator[None, None, PromptLogprobs]:
    """Score every token except the first, and return the `top` most probable tokens at its position.

    Uses the weights served at the first turn, also if others are published meanwhile. A forward pass computes at most
    `chunk` tokens and at most `rows_at_once` rows of logits, which limits its memory. distribution: the distribution
    that the tokens are scored under. computing: a context in which the model computes as an adapter. turns: limits the
    duration of turns.
    Raises GenerationError if the model's logits are not finite.
    """
    parameters, version = policy.trainable(), policy.version
    rows = min(chunk, rows_at_once(policy.vocab_size))
    cache: list[Any] = make_prompt_cache(policy.model)
    logprobs: list[float] = []
    alternatives: list[Alternatives] = []
    for start in range(0, len(tokens) - 1, rows):
        target_N = mx.array(list(tokens[start + 1 : start + 1 + rows]))
        token_1_N = mx.array([list(tokens[start : start + target_N.size])])
        turns.begin()
        with (
            policy.using(parameters),
            evaluation_mode(policy.model),
            computing(),
            turns.recorded(policy.model, gradients=False) as stages,
        ):
            logits_N_V = policy.model(token_1_N, cache=cache)[0]
        yield from turns.evaluate(stages.take(), [logits_N_V, [layer.state for layer in cache]])
        logp_N, best = _scores(logits_N_V, target_N, min(top, logits_N_V.shape[-1]), distribution)
        logprobs += logp_N.tolist()
        alternatives += best
        yield
    return PromptLogprobs(version=version, logprobs=tuple(logprobs), top_logprobs=tuple(alternatives))


def _scores(
    logits_N_V: mx.array, target_N: mx.array, top: int, distribution: SamplingDistribution
) -> tuple[NDArray[np.float32], list[Alternatives]]:
    sampled = SampledTokens(target_N, None, distribution)
    totals = scoring(sampled)(logits_N_V)
    logp_N = np.array(totals.logp_N)
    if not np.isfinite(logp_N).all():
        raise GenerationError("the model's logits are not finite")
    if not top:
        return logp_N, [()] * len(logp_N)
    z_N_V = sampled.scaled(logits_N_V, None)
    best_N_K = mx.argpartition(-z_N_V, kth=top - 1, axis=-1)[:, :top]
    best_logp_N_K = np.array(mx.take_along_axis(z_N_V, best_N_K, axis=-1) - totals.logsumexp_N[:, None])
    token_N_K = np.array(best_N_K)
    order_N_K = np.argsort(-best_logp_N_K, axis=-1, kind="stable")
    return logp_N, [
        tuple((int(token_K[k]), float(logp_K[k])) for k in order_K)
        for token_K, logp_K, order_K in zip(token_N_K, best_logp_N_K, order_N_K, strict=True)
    ]
