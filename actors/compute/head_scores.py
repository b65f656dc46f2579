"""Scores of drawn tokens from hidden states, never holding the vocabulary for all of them: see `token_scores`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from actors.compute.head import SplitModel
from actors.compute.token_scores import Draws, SampledLaw, TokenScores, Totals, scoring, token_scores

__all__ = ["LOGITS_BUDGET", "Draws", "HeadScores", "SampledLaw", "TokenScores", "token_scores"]

LOGITS_BUDGET = 2**22
"""Logits (rows x vocabulary) that the head computes at once; beyond, it runs in pieces, one after the other."""

Weights = dict[str, mx.array]


class HeadScores:
    """Scores hidden states through a model's own head, in pieces of at most `budget` logits.

    A piece begins when the one before has ended, in the forward pass and in the backward pass, which computes the
    logits once more. Either holds a constant number of arrays of `budget` numbers, however many tokens there are.
    """

    def __init__(self, split: SplitModel, vocab_size: int, *, budget: int = LOGITS_BUDGET) -> None:
        self._split = split
        self._rows = max(1, budget // vocab_size)

    def __call__(self, hidden_N_D: mx.array, draws: Draws) -> TokenScores:
        """Score the targets of `draws` after `hidden_N_D`: see `token_scores`.

        Hidden states have gradients, and so have the trainable weights of the head that the model holds in the call.
        """
        if hidden_N_D.shape[0] <= self._rows:
            totals = scoring(draws)(self._split.head(hidden_N_D))
        else:
            totals = self._in_pieces(hidden_N_D, draws)
        return Totals(*totals).scores(draws)

    def _in_pieces(self, hidden_N_D: mx.array, draws: Draws) -> Totals:
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

    def _forward(self, hidden_N_D: mx.array, draws: Draws) -> Totals:
        pieces: list[Totals] = []
        for rows in self._stretches(hidden_N_D):
            hidden_n_D = _after(pieces[-1] if pieces else (), hidden_N_D[rows])
            pieces.append(Totals(*scoring(draws.at(rows))(self._split.head(hidden_n_D))))
        return Totals(*(mx.concatenate(list(parts)) for parts in zip(*pieces, strict=True)))

    def _backward(
        self, hidden_N_D: mx.array, weights: Weights, draws: Draws, cotangents: Totals, totals: Totals
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
