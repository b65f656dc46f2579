"""Scores of sampled tokens from hidden states, in chunks of rows: logits of all tokens are never held at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import mlx.core as mx

from clotho.backend import backend
from clotho.models.head import SplitModel
from clotho.models.stages import after, mark
from clotho.scoring.token_scores import SampledTokens, TokenScores, Totals, scoring, slopes

Weights = dict[str, mx.array]
Compute = Callable[[mx.array, SampledTokens], Sequence[mx.array]]


def rows_at_once(vocab_size: int) -> int:
    """Return the number of rows of a chunk."""
    computing = backend()
    return max(computing.chunk_rows, computing.chunk_logits // vocab_size)


class HeadScores:
    """Scores hidden states with the model's head in chunks of rows, so that memory does not depend on their number."""

    def __init__(self, split: SplitModel, vocab_size: int, *, rows: int | None = None) -> None:
        self._split = split
        self._rows = rows or rows_at_once(vocab_size)

    def __call__(self, hidden_N_D: mx.array, sampled: SampledTokens, *, logp_only: bool = False) -> TokenScores:
        """Score the targets of `sampled` given `hidden_N_D`: see `score`.

        Differentiable in the hidden states and in the trainable weights of the head. logp_only: only log-probabilities
        will be differentiated, so their gradient can be computed in the forward pass.
        """
        if logp_only and sampled.support_N_K is None and sampled.teacher is None and not self._split.head_weights():
            return self._with_gradient(hidden_N_D, sampled)
        in_one = hidden_N_D.shape[0] <= self._rows
        totals = self._totals(hidden_N_D, sampled) if in_one else Totals(*self._in_chunks(hidden_N_D, sampled))
        return totals.scores(sampled)

    def _with_gradient(self, hidden_N_D: mx.array, sampled: SampledTokens) -> TokenScores:
        """Compute each row's gradient in the forward pass; the backward pass multiplies it by the row's cotangent.

        This saves the backward pass from recomputing the logits: one matrix product and one exponential of three.
        """

        @mx.custom_function
        def scored(hidden_N_D: mx.array) -> tuple[mx.array, mx.array, mx.array]:
            """Return log-probability, entropy, and their gradient to the hidden states."""

            def chunk(hidden_n_D: mx.array, some: SampledTokens) -> Sequence[mx.array]:
                totals, slope_n_V = slopes(self._split.head(hidden_n_D), some)
                _, (gradient_n_D,) = mx.vjp(self._split.head, [hidden_n_D], [slope_n_V])
                return totals.logp_N, totals.entropy_N, gradient_n_D

            logp_N, entropy_N, gradient_N_D = self._by_chunks(chunk, hidden_N_D, sampled)
            return logp_N, entropy_N, gradient_N_D

        @scored.vjp
        def backward(hidden_N_D: mx.array, cotangents: Sequence[mx.array], outputs: Sequence[mx.array]) -> mx.array:
            g_logp_N = cotangents[0] * sampled.inverse_temperature
            return (g_logp_N[:, None] * outputs[2]).astype(hidden_N_D.dtype)

        logp_N, entropy_N, _ = cast(tuple[mx.array, ...], scored(hidden_N_D))
        return TokenScores(logp_N, mx.stop_gradient(entropy_N))

    def _in_chunks(self, hidden_N_D: mx.array, sampled: SampledTokens) -> Totals:
        @mx.custom_function
        def totals(hidden_N_D: mx.array, weights: Weights) -> Totals:
            with self._split.using(weights):
                return Totals(*self._by_chunks(self._totals, hidden_N_D, sampled))

        @totals.vjp
        def backward(
            primals: tuple[mx.array, Weights], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
        ) -> tuple[mx.array, Weights]:
            return self._backward(*primals, sampled, Totals(*cotangents), Totals(*outputs))

        return cast(Totals, totals(hidden_N_D, self._split.head_weights()))

    def _totals(self, hidden_n_D: mx.array, sampled: SampledTokens) -> Totals:
        return Totals(*scoring(sampled)(self._split.head(hidden_n_D)))

    def _by_chunks(self, compute: Compute, hidden_N_D: mx.array, sampled: SampledTokens) -> list[mx.array]:
        """Return the joined results of all chunks, which are computed one after the other."""
        chunks: list[Sequence[mx.array]] = []
        for rows in self._chunks(hidden_N_D):
            hidden_n_D = after(chunks[-1] if chunks else (), hidden_N_D[rows])
            chunks.append(compute(hidden_n_D, sampled.at(rows)))
            mark("head", chunks[-1], work=hidden_n_D.shape[0])
        return [mx.concatenate(list(parts)) for parts in zip(*chunks, strict=True)]

    def _backward(
        self, hidden_N_D: mx.array, weights: Weights, sampled: SampledTokens, cotangents: Totals, totals: Totals
    ) -> tuple[mx.array, Weights]:
        """Return the gradients of hidden states and weights; those of weights are summed over chunks in float32."""
        chunks: list[mx.array] = []
        sums = [mx.zeros(array.shape) for array in weights.values()]
        for rows in self._chunks(hidden_N_D):

            def chunk(hidden_n_D: mx.array, *arrays: mx.array, rows: slice = rows) -> Totals:
                with self._split.using(dict(zip(weights, arrays, strict=True))):
                    return scoring(sampled.at(rows), totals.at(rows))(self._split.head(hidden_n_D))

            hidden_n_D = after([chunks[-1], *sums] if chunks else cotangents, hidden_N_D[rows])
            _, gradients = mx.vjp(chunk, [hidden_n_D, *weights.values()], list(cotangents.at(rows)))
            chunks.append(gradients[0])
            sums = [total + gradient for total, gradient in zip(sums, gradients[1:], strict=True)]
            mark("head gradient", [chunks[-1], *sums], work=hidden_n_D.shape[0])
        narrow = (total.astype(array.dtype) for total, array in zip(sums, weights.values(), strict=True))
        return mx.concatenate(chunks), dict(zip(weights, narrow, strict=True))

    def _chunks(self, hidden_N_D: mx.array) -> list[slice]:
        return [slice(start, start + self._rows) for start in range(0, hidden_N_D.shape[0], self._rows)]
