"""Log-probabilities of given tokens under the policy, the base model or an adapter: of prompts and references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from clotho.inference.cache_layout import evaluation_mode, pass_context
from clotho.inference.parts import RowWeights
from clotho.inference.rows import RowAdapter
from clotho.models.parameters import Parameters
from clotho.models.policy_model import PolicyModel
from clotho.models.turns import UNDIVIDED, TurnBudget
from clotho.scoring.token_scores import SampledTokens, SamplingDistribution, rows_at_once, scoring
from protocols.errors import GenerationError
from protocols.sampling import PromptLogprobs

MODEL_DISTRIBUTION = SamplingDistribution(temperature=1.0)
Alternatives = tuple[tuple[int, float], ...]


class PromptScorer:
    """Scores prompts with a model of its own, in one thread, whatever is served and decoded meanwhile."""

    def __init__(
        self, policy: PolicyModel, *, chunk: int, rows: RowWeights | None = None, turns: TurnBudget = UNDIVIDED
    ) -> None:
        """policy: a model that nothing else computes with. chunk: largest number of tokens of a forward pass.

        rows: whose adapters may be named; None: only the policy. turns: limits the duration of turns.
        """
        self._policy, self._chunk, self._turns = policy, chunk, turns
        self._rows = (rows or RowWeights()).of_copy(policy)

    def score(
        self,
        parameters: Parameters,
        tokens: Sequence[int],
        *,
        version: int,
        top: int = 0,
        distribution: SamplingDistribution = MODEL_DISTRIBUTION,
        adapter: RowAdapter | None = None,
    ) -> PromptLogprobs:
        """Score every token except the first, and return the `top` most probable tokens at its position.

        A forward pass computes at most `chunk` tokens and at most `rows_at_once` rows of logits, which limits its
        memory. parameters, version: of the policy. distribution: the distribution that the tokens are scored under.
        adapter: instead of the policy's own. Raises GenerationError if the model's logits are not finite.
        """
        self._policy.use(parameters)
        try:
            logprobs, entropies, alternatives = self._score_chunks(tokens, top, distribution, adapter)
        finally:
            self._policy.release()
        self._rows.keep({adapter.version} if adapter is not None else set())
        own = version if adapter is None else adapter.version
        return PromptLogprobs(
            version=own, logprobs=tuple(logprobs), top_logprobs=tuple(alternatives), entropies=tuple(entropies)
        )

    def _score_chunks(
        self, tokens: Sequence[int], top: int, distribution: SamplingDistribution, adapter: RowAdapter | None
    ) -> tuple[list[float], list[float], list[Alternatives]]:
        policy, turns = self._policy, self._turns
        rows = min(self._chunk, rows_at_once(policy.vocab_size))
        cache: list[Any] = make_prompt_cache(policy.model)
        logprobs, entropies = list[float](), list[float]()
        alternatives: list[Alternatives] = []
        for start in range(0, len(tokens) - 1, rows):
            target_N = mx.array(list(tokens[start + 1 : start + 1 + rows]))
            token_1_N = mx.array([list(tokens[start : start + target_N.size])])
            turns.begin()
            with (
                evaluation_mode(policy.model),
                pass_context(self._rows.computing, [adapter]),
                turns.recorded(policy.model, gradients=False) as stages,
            ):
                logits_N_V = policy.model(token_1_N, cache=cache)[0]
            turns.evaluate(stages.take(), [logits_N_V, [layer.state for layer in cache]])
            logp_N, entropy_N, best = _scores(logits_N_V, target_N, min(top, logits_N_V.shape[-1]), distribution)
            logprobs += logp_N.tolist()
            entropies += entropy_N.tolist()
            alternatives += best
            turns.pause()
        return logprobs, entropies, alternatives


def _scores(
    logits_N_V: mx.array, target_N: mx.array, top: int, distribution: SamplingDistribution
) -> tuple[NDArray[np.float32], NDArray[np.float32], list[Alternatives]]:
    sampled = SampledTokens(target_N, None, distribution)
    totals = scoring(sampled)(logits_N_V)
    logp_N, entropy_N = np.array(totals.logp_N), np.array(totals.entropy_N)
    if not np.isfinite(logp_N).all():
        raise GenerationError("the model's logits are not finite")
    if not top:
        return logp_N, entropy_N, [()] * len(logp_N)
    z_N_V = sampled.scaled(logits_N_V, None)
    best_N_K = mx.argpartition(-z_N_V, kth=top - 1, axis=-1)[:, :top]
    best_logp_N_K = np.array(mx.take_along_axis(z_N_V, best_N_K, axis=-1) - totals.logsumexp_N[:, None])
    token_N_K = np.array(best_N_K)
    order_N_K = np.argsort(-best_logp_N_K, axis=-1, kind="stable")
    best = [
        tuple((int(token_K[k]), float(logp_K[k])) for k in order_K)
        for token_K, logp_K, order_K in zip(token_N_K, best_logp_N_K, order_N_K, strict=True)
    ]
    return logp_N, entropy_N, best
