"""Scores of sampled tokens from hidden states, never holding the vocabulary for all of them: see `token_scores`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from clotho.models.head import SplitModel
from clotho.scoring.token_scores import (
    SampledTokens,
    SamplingDistribution,
    TokenScores,
    Totals,
    scoring,
    slopes,
    token_scores,
)

__all__ = ["HeadScores", "SampledTokens", "SamplingDistribution", "TokenScores", "rows_at_once", "token_scores"]

LOGITS_AT_ONCE = 2**20
"""Logits (rows x vocabulary) that the head computes at once; beyond, it runs in pieces, one after the other."""

FEWEST_ROWS = 32
"""Rows of a piece however large the vocabulary: a product reads all weights of the head for each piece."""

Weights = dict[str, mx.array]


def rows_at_once(vocab_size: int) -> int:
    """Rows of logits that are computed at once."""
    return max(FEWEST_ROWS, LOGITS_AT_ONCE // vocab_size)


class HeadScores:
    """Scores hidden states through a model's own head, in pieces of `rows` rows, by default `rows_at_once`.

    A piece begins when the one before has ended, in the forward pass and in the backward pass, which computes the
    logits once more. Either holds a constant number of arrays as large as a piece, however many tokens there are.
    """

    def __init__(self, split: SplitModel, vocab_size: int, *, rows: int | None = None) -> None:
        self._split = split
        self._rows = rows or rows_at_once(vocab_size)

    def __call__(self, hidden_N_D: mx.array, draws: SampledTokens, *, logp_only: bool = False) -> TokenScores:
        """Score the targets of `draws` after `hidden_N_D`: see `token_scores`.

        Hidden states have gradients, and so have the trainable weights of the head that the model holds in the call.
        logp_only: the gradient that follows is one of log-probabilities alone, which may then be prepared here.
        """
        if logp_only and draws.support_N_K is None and draws.teacher is None and not self._split.head_weights():
            return self._prepared(hidden_N_D, draws)
        if hidden_N_D.shape[0] <= self._rows:
            totals = scoring(draws)(self._split.head(hidden_N_D))
        else:
            totals = self._in_pieces(hidden_N_D, draws)
        return Totals(*totals).scores(draws)

    def _prepared(self, hidden_N_D: mx.array, draws: SampledTokens) -> TokenScores:
        """Take each row's gradient while its logits are there; the cotangent of a row is but one factor.

        That spares the backward pass its second look at the vocabulary: a product and an exponential in three.
        """

        @mx.custom_function
        def prepared(hidden_N_D: mx.array) -> tuple[mx.array, mx.array, mx.array]:
            pieces: list[tuple[mx.array, mx.array, mx.array]] = []
            for rows in self._stretches(hidden_N_D):
                hidden_n_D = _after(pieces[-1] if pieces else (), hidden_N_D[rows])
                totals, slope_n_V = slopes(self._split.head(hidden_n_D), draws.at(rows))
                _, (along_n_D,) = mx.vjp(self._split.head, [hidden_n_D], [slope_n_V])
                pieces.append((totals.logp_N, totals.entropy_N, along_n_D))
            logp_N, entropy_N, along_N_D = (mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True))
            return logp_N, entropy_N, along_N_D

        @prepared.vjp
        def backward(hidden_N_D: mx.array, cotangents: Sequence[mx.array], found: Sequence[mx.array]) -> mx.array:
            g_logp_N = cotangents[0] * draws.inverse_temperature
            return (g_logp_N[:, None] * found[2]).astype(hidden_N_D.dtype)

        logp_N, entropy_N, _ = cast(tuple[mx.array, ...], prepared(hidden_N_D))
        return TokenScores(logp_N, mx.stop_gradient(entropy_N))

    def _in_pieces(self, hidden_N_D: mx.array, draws: SampledTokens) -> Totals:
        @mx.custom_function
        def totals(hidden_N_D: mx.array, weights: Weights) -> Totals:
            with self._split.using(weights):
                return self._forward(hidden_N_D, draws)

        @totals.vjp
        def backward(
            primals: tuple[mx.array, Weights], cotangents: Sequence[mx.array], found: Sequence[mx.array]
        ) -> tuple[mx.array, Weights]:
            return self._backward(*primals, draws, Totals(*cotangents), Totals(*found))

        return cast(Totals, totals(hidden_N_D, self._split.head_weights()))

    def _forward(self, hidden_N_D: mx.array, draws: SampledTokens) -> Totals:
        pieces: list[Totals] = []
        for rows in self._stretches(hidden_N_D):
            hidden_n_D = _after(pieces[-1] if pieces else (), hidden_N_D[rows])
            pieces.append(Totals(*scoring(draws.at(rows))(self._split.head(hidden_n_D))))
        return Totals(*(mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True)))

    def _backward(
        self, hidden_N_D: mx.array, weights: Weights, draws: SampledTokens, cotangents: Totals, totals: Totals
    ) -> tuple[mx.array, Weights]:
        """Gradients of hidden states and of weights; the latter add up in float32, piece by piece."""
        pieces: list[mx.array] = []
        sums = [mx.zeros(array.shape) for array in weights.values()]
        for rows in self._stretches(hidden_N_D):

            def piece(hidden_n_D: mx.array, *arrays: mx.array, rows: slice = rows) -> Totals:
                with self._split.using(dict(zip(weights, arrays, strict=True))):
                    return scoring(draws.at(rows), totals.at(rows))(self._split.head(hidden_n_D))

            hidden_n_D = _after([pieces[-1], *sums] if pieces else cotangents, hidden_N_D[rows])
            _, gradients = mx.vjp(piece, [hidden_n_D, *weights.values()], list(cotangents.at(rows)))
            pieces.append(gradients[0])
            sums = [total + gradient for total, gradient in zip(sums, gradients[1:], strict=True)]
        narrow = (total.astype(array.dtype) for total, array in zip(sums, weights.values(), strict=True))
        return mx.concatenate(pieces), dict(zip(weights, narrow, strict=True))

    def _stretches(self, hidden_N_D: mx.array) -> list[slice]:
        return [slice(start, start + self._rows) for start in range(0, hidden_N_D.shape[0], self._rows)]


def _after(done: Sequence[mx.array], array: mx.array) -> mx.array:
    """The array, not to be used before `done` is computed."""
    return mx.depends([array], list(done))[0] if done else array
