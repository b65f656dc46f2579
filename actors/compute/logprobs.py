"""Teacher-forced log-probabilities and entropies: what the policy thinks of tokens that were already drawn.

The distribution is the one that was sampled from: softmax(logits / temperature), in float32 and natural logs.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from actors.compute.head import SplitModel, split_model
from actors.compute.trees import flat, nested

LOGITS_BUDGET = 2**25
"""Logits (rows x vocabulary) held at once in float32; beyond, the head runs in pieces, recomputed for the gradient."""

LOWEST_LOGIT = -1e9
"""Logits below it (minus infinity, for words that a model never says) count as this: the entropy stays finite."""


class TokenScores(NamedTuple):
    """Per completion token, float32 nats: log-probability of the token, entropy of the distribution it came from."""

    logp_N: mx.array
    entropy_N: mx.array


def token_scores(logits_N_V: mx.array, target_N: mx.array, *, temperature: float) -> TokenScores:
    """Log-probability of the targets, and exact entropy, under softmax(logits / temperature).

    logp = z_target - log sum exp z, H = log sum exp z - sum p z, with z = logits / temperature in float32.
    logits_N_V: any floating type. temperature > 0. The entropy is in [0, log V] up to rounding.
    """
    z_N_V = mx.maximum(logits_N_V.astype(mx.float32) * (1.0 / temperature), LOWEST_LOGIT)
    z_N_V = z_N_V - mx.stop_gradient(mx.max(z_N_V, axis=-1, keepdims=True))
    e_N_V = mx.exp(z_N_V)  # once: on the CPU, exponentials are the price of this function
    sum_N = mx.sum(e_N_V, axis=-1)
    logsumexp_N = mx.log(sum_N)
    target_z_N = mx.take_along_axis(z_N_V, target_N[:, None], axis=-1)[:, 0]
    return TokenScores(target_z_N - logsumexp_N, logsumexp_N - mx.sum(e_N_V * z_N_V, axis=-1) / sum_N)


class TeacherForcing:
    """Scores the completion tokens of right-padded sequences, without caches.

    Where the model can be split, the head runs at the scored positions only, in pieces of `budget` logits.
    """

    def __init__(self, model: nn.Module, vocab_size: int, *, budget: int = LOGITS_BUDGET) -> None:
        self._model = model
        self._split = split_model(model, vocab_size)
        self._rows = max(1, budget // vocab_size)

    def __call__(
        self, tokens_B_S: mx.array, position_N: mx.array, target_N: mx.array, *, temperature: float
    ) -> TokenScores:
        """Score token `target_N[n]` at flat position `position_N[n]` = row * S + column of what comes before it."""
        if self._split is None:
            logits_P_V = self._model(tokens_B_S).reshape(tokens_B_S.size, -1)
            return token_scores(logits_P_V[position_N], target_N, temperature=temperature)
        hidden_B_S_D = self._split.blocks(tokens_B_S)
        hidden_N_D = hidden_B_S_D.reshape(tokens_B_S.size, -1)[position_N]
        if hidden_N_D.shape[0] <= self._rows:
            return token_scores(self._split.head(hidden_N_D), target_N, temperature=temperature)
        return self._in_pieces(self._split, hidden_N_D, target_N, temperature)

    def _in_pieces(
        self, split: SplitModel, hidden_N_D: mx.array, target_N: mx.array, temperature: float
    ) -> TokenScores:
        """Run the head over pieces of rows; the backward pass recomputes each piece instead of keeping its logits."""

        def piece(rows: slice, weights: dict[str, mx.array], hidden_n_D: mx.array) -> tuple[mx.array, mx.array]:
            self._model.update(nested(weights))
            scores = token_scores(split.head(hidden_n_D), target_N[rows], temperature=temperature)
            return scores.logp_N, scores.entropy_N

        weights = self._head_weights()
        slices = [slice(start, start + self._rows) for start in range(0, hidden_N_D.shape[0], self._rows)]
        pieces = [mx.checkpoint(partial(piece, rows))(weights, hidden_N_D[rows]) for rows in slices]
        return TokenScores(mx.concatenate([p[0] for p in pieces]), mx.concatenate([p[1] for p in pieces]))

    def _head_weights(self) -> dict[str, mx.array]:
        """Trainable weights outside the blocks' layers: those that the head may use, tied embeddings among them."""
        return {k: v for k, v in flat(self._model.trainable_parameters()).items() if ".layers." not in f".{k}"}
