"""Log-probability, entropy and distillation loss of sampled tokens, with the backward pass in closed form.

Tokens are sampled from softmax((logits + bias) / temperature) over a support. With z its scaled logits,
L = log sum exp z and p = exp(z - L), in float32 and natural logs:

    log p_y = z_y - L         d log p_y / d z_i = [i = y] - p_i
    H = L - sum p z           d H       / d z_i = -p_i (log p_i + H)

A teacher's probabilities q_k of tokens k add up to s = 1, or to 0 if the teacher gives none. The cross-entropy uses the
policy's distribution over the whole vocabulary, because a teacher's tokens may be outside the support:

    C = s L - sum_k q_k z_k   d C       / d z_i = s p_i - q_i

A backward pass needs three numbers per token besides the logits, and one exponential per logit (two with both a support
and a teacher). From hidden states, logits are computed in chunks of rows: those of all tokens are never held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from clotho.backend import backend
from clotho.models.head import SplitModel
from clotho.models.stages import after, mark

LOWEST_LOGIT = -1e9
"""Lower bound of logits, so that the entropy stays finite if a logit is minus infinity."""


class SamplingDistribution(NamedTuple):
    """The distribution tokens were sampled from: softmax((logits + bias) / temperature) over the support.

    temperature: above 0. logit_bias: pairs of a token and the value added to its logit; each token at most once.
    """

    temperature: float
    logit_bias: tuple[tuple[int, float], ...] = ()


class Teacher(NamedTuple):
    """A teacher's distribution at each token: token_N_K, int32, padded with -1; share_N_K: probabilities, float32.

    The probabilities of a row add up to 1, or to 0 if the teacher gives none; those of padding are 0.
    """

    token_N_K: mx.array
    share_N_K: mx.array

    @property
    def present_N(self) -> mx.array:
        """1 at tokens with a teacher's distribution, else 0."""
        return mx.any(self.share_N_K > 0, axis=-1).astype(mx.float32)


class SampledTokens(NamedTuple):
    """Sampled tokens and their sampling distribution.

    support_N_K: tokens (int32) that could be sampled, each once, including the target, padded with -1; None if the
    support is the whole vocabulary. temperature_N: above 0, float32; None if every token has
    the temperature of the distribution. teacher: None without a teacher.
    """

    target_N: mx.array
    support_N_K: mx.array | None
    distribution: SamplingDistribution
    temperature_N: mx.array | None = None
    teacher: Teacher | None = None

    def at(self, rows: slice) -> SampledTokens:
        """Return the given rows."""
        return SampledTokens(
            self.target_N[rows],
            None if self.support_N_K is None else self.support_N_K[rows],
            self.distribution,
            None if self.temperature_N is None else self.temperature_N[rows],
            None if self.teacher is None else Teacher(*(array[rows] for array in self.teacher)),
        )

    @property
    def inverse_temperature(self) -> float | mx.array:
        """1 / temperature: one number, or one per token, (N,)."""
        return 1.0 / (self.distribution.temperature if self.temperature_N is None else self.temperature_N)

    def scaled(self, logits_N_V: mx.array, among_N_K: mx.array | None) -> mx.array:
        """Return (logits + bias) / temperature, float32, of all or of given tokens; padding gets the lowest."""
        token_N_K = None if among_N_K is None else mx.maximum(among_N_K, 0)
        chosen_N_M = logits_N_V if token_N_K is None else mx.take_along_axis(logits_N_V, token_N_K, axis=-1)
        z_N_M = chosen_N_M.astype(mx.float32)
        if self.distribution.logit_bias:
            tokens, addends = zip(*self.distribution.logit_bias, strict=True)
            bias_V = mx.zeros(logits_N_V.shape[-1]).at[mx.array(tokens)].add(mx.array(addends, dtype=mx.float32))
            z_N_M = z_N_M + (bias_V if token_N_K is None else bias_V[token_N_K])
        inverse = self.inverse_temperature
        if isinstance(inverse, mx.array):
            z_N_M = z_N_M * inverse[:, None]
        elif inverse != 1.0:
            z_N_M = z_N_M * inverse
        z_N_M = mx.maximum(z_N_M, LOWEST_LOGIT)
        return z_N_M if among_N_K is None else mx.where(among_N_K < 0, LOWEST_LOGIT, z_N_M)

    @property
    def target_column(self) -> mx.array:
        """Index of the targets among the scaled logits of the support, (N, 1)."""
        if self.support_N_K is None:
            return self.target_N[:, None]
        return mx.argmax(self.support_N_K == self.target_N[:, None], axis=-1, keepdims=True)


LANES = 512
"""Rows are split into segments of this length, which are reduced lane by lane, then across lanes."""


class TokenScores(NamedTuple):
    """Per completion token, float32, in nats: log-probability, and entropy of the sampling distribution.

    cross_entropy_N: cross-entropy of the teacher's distribution and the policy; 0 at tokens without a teacher's
    distribution; None without a teacher.
    """

    logp_N: mx.array
    entropy_N: mx.array
    cross_entropy_N: mx.array | None = None


class Totals(NamedTuple):
    """Results of the forward pass that the backward pass needs, (N,) float32; or, in the same order, their cotangents.

    Without a teacher the cross-entropy is 0.
    """

    logp_N: mx.array
    entropy_N: mx.array
    logsumexp_N: mx.array
    cross_entropy_N: mx.array

    def at(self, rows: slice) -> Totals:
        """Return the given rows."""
        return Totals(*(array[rows] for array in self))

    def scores(self, sampled: SampledTokens) -> TokenScores:
        """Return the scores for callers."""
        return TokenScores(self.logp_N, self.entropy_N, None if sampled.teacher is None else self.cross_entropy_N)


def score(logits_N_V: mx.array, sampled: SampledTokens) -> TokenScores:
    """Return log-probabilities of targets and exact entropies in nats; differentiable in logits of any type."""
    return Totals(*scoring(sampled)(logits_N_V)).scores(sampled)


def scoring(sampled: SampledTokens, known: Totals | None = None) -> Callable[[mx.array], Totals]:
    """Return a function from logits to totals. known: of an earlier pass, which spares the backward pass a forward."""

    @mx.custom_function
    def totals(logits_N_V: mx.array) -> Totals:
        return _totals(logits_N_V, sampled)[0]

    @totals.vjp
    def backward(logits_N_V: mx.array, cotangents: Sequence[mx.array], found: Sequence[mx.array]) -> mx.array:
        return _logits_gradient(logits_N_V, sampled, Totals(*cotangents), known or Totals(*found))

    return cast(Callable[[mx.array], Totals], totals)


def slopes(logits_N_V: mx.array, sampled: SampledTokens) -> tuple[Totals, mx.array]:
    """Return totals and T d log p_y / d logits, (N, V), with the same exponentials; without supports and teacher."""
    totals, e_N_V, sum_N = _totals(logits_N_V, sampled)
    at_target_N = 1.0 - backend().exp(totals.logp_N)
    slope_N_V = mx.put_along_axis(e_N_V * (-1.0 / sum_N)[:, None], sampled.target_column, at_target_N[:, None], axis=-1)
    return totals, slope_N_V.astype(logits_N_V.dtype)


def _totals(logits_N_V: mx.array, sampled: SampledTokens) -> tuple[Totals, mx.array, mx.array]:
    """Return totals, exponentials of the scaled logits, (N, M), with maximum 1 per row, and their sums."""
    z_N_M = sampled.scaled(logits_N_V, sampled.support_N_K)
    largest_N_1 = _row_max(z_N_M)
    z_N_M = z_N_M - largest_N_1
    e_N_M = backend().exp(z_N_M)
    sum_N = _row_sums(e_N_M)
    relative_N = mx.log(sum_N)
    logp_N = mx.take_along_axis(z_N_M, sampled.target_column, axis=-1)[:, 0] - relative_N
    entropy_N = relative_N - _row_sums(e_N_M * z_N_M) / sum_N
    logsumexp_N = relative_N + largest_N_1[:, 0]
    totals = Totals(logp_N, entropy_N, logsumexp_N, _cross_entropy(logits_N_V, sampled, logsumexp_N))
    return totals, e_N_M, sum_N


def _cross_entropy(logits_N_V: mx.array, sampled: SampledTokens, logsumexp_N: mx.array) -> mx.array:
    """Return C of the module's docstring. logsumexp_N: over the support."""
    teacher = sampled.teacher
    if teacher is None:
        return mx.zeros_like(logsumexp_N)
    whole_N = logsumexp_N if sampled.support_N_K is None else _logsumexp(sampled.scaled(logits_N_V, None))
    return mx.sum(teacher.share_N_K * (whole_N[:, None] - sampled.scaled(logits_N_V, teacher.token_N_K)), axis=-1)


def _logits_gradient(logits_N_V: mx.array, sampled: SampledTokens, cotangents: Totals, totals: Totals) -> mx.array:
    """Return the gradient as p (slope log p + offset), replaced at the target."""
    g_logp_N, g_entropy_N, g_cross_N = (
        cotangent_N * sampled.inverse_temperature
        for cotangent_N in (cotangents.logp_N, cotangents.entropy_N, cotangents.cross_entropy_N)
    )
    slope_N, offset_N = -g_entropy_N, -(g_logp_N + g_entropy_N * totals.entropy_N)
    if sampled.teacher is not None:
        g_cross_N = g_cross_N * sampled.teacher.present_N
        if sampled.support_N_K is None:
            offset_N = offset_N + g_cross_N
    logp_N_M = sampled.scaled(logits_N_V, sampled.support_N_K) - totals.logsumexp_N[:, None]
    gradient_N_M = backend().exp(logp_N_M) * (slope_N[:, None] * logp_N_M + offset_N[:, None])
    target_N = g_logp_N + backend().exp(totals.logp_N) * (slope_N * totals.logp_N + offset_N)
    gradient_N_M = mx.put_along_axis(gradient_N_M, sampled.target_column, target_N[:, None], axis=-1)
    rows_N_1 = mx.arange(logits_N_V.shape[0])[:, None]
    if sampled.support_N_K is not None:
        outside_N_V = _outside_support(logits_N_V, sampled, g_cross_N)
        gradient_N_M = outside_N_V.at[rows_N_1, mx.maximum(sampled.support_N_K, 0)].add(gradient_N_M)
    if sampled.teacher is not None:
        teacher_N_K = g_cross_N[:, None] * sampled.teacher.share_N_K
        gradient_N_M = gradient_N_M.at[rows_N_1, mx.maximum(sampled.teacher.token_N_K, 0)].subtract(teacher_N_K)
    return gradient_N_M.astype(logits_N_V.dtype)


def _outside_support(logits_N_V: mx.array, sampled: SampledTokens, g_cross_N: mx.array) -> mx.array:
    """Return the gradient outside the support, (N, V): s p of the cross-entropy, 0 without a teacher."""
    if sampled.teacher is None:
        return mx.zeros(logits_N_V.shape)
    z_N_V = sampled.scaled(logits_N_V, None)
    return backend().exp(z_N_V - _logsumexp(z_N_V)[:, None]) * g_cross_N[:, None]


def _logsumexp(z_N_V: mx.array) -> mx.array:
    largest_N_1 = _row_max(z_N_V)
    return mx.log(_row_sums(backend().exp(z_N_V - largest_N_1))) + largest_N_1[:, 0]


def _row_max(x_N_M: mx.array) -> mx.array:
    """Return the maximum of each row, (N, 1)."""
    whole = x_N_M.shape[-1] // LANES * LANES
    if whole:
        lanes_N_L = mx.max(mx.unflatten(x_N_M[:, :whole], -1, (-1, LANES)), axis=-2)
        x_N_M = mx.concatenate([lanes_N_L, x_N_M[:, whole:]], axis=-1)
    return mx.max(x_N_M, axis=-1, keepdims=True)


def _row_sums(x_N_M: mx.array) -> mx.array:
    """Sum over the last axis in two stages: MLX adds sequentially on the CPU, which is off by 1e-4 for a vocabulary.

    Across lanes, the CPU backend reduces several numbers at once.
    """
    whole = x_N_M.shape[-1] // LANES * LANES
    rest_N = mx.sum(x_N_M[:, whole:], axis=-1)
    if not whole:
        return rest_N
    return rest_N + mx.sum(mx.sum(mx.unflatten(x_N_M[:, :whole], -1, (-1, LANES)), axis=-2), axis=-1)


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
