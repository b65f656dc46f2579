"""Log-probability, entropy and distillation loss of sampled tokens from logits, with the backward pass in closed form.

Tokens are sampled from softmax((logits + bias) / temperature) over a support. With z its scaled logits,
L = log sum exp z and p = exp(z - L), in float32 and natural logs:

    log p_y = z_y - L         d log p_y / d z_i = [i = y] - p_i
    H = L - sum p z           d H       / d z_i = -p_i (log p_i + H)

A teacher's alternatives k, of shares q_k that add up to s = 1 (or to 0, where it said nothing), are held against the
same distribution over the whole vocabulary, whatever the support: what a teacher says may be what could not be sampled.

    C = s L - sum_k q_k z_k   d C       / d z_i = s p_i - q_i

So a backward pass needs three numbers per token beside the logits, and one exponential per logit (two where a support
and a teacher come together).

Tokens that were sampled, the distribution they were sampled from, and what a teacher would have said in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from clotho.cpu.layers import exp

LOWEST_LOGIT = -1e9
"""Logits below it (minus infinity, for words that a model never says) count as this: the entropy stays finite."""


class SamplingDistribution(NamedTuple):
    """The distribution tokens were sampled from: softmax((logits + bias) / temperature) over the support.

    temperature: above 0. logit_bias: pairs of a token and what is added to its logit; no token twice.
    """

    temperature: float
    logit_bias: tuple[tuple[int, float], ...] = ()


class Teacher(NamedTuple):
    """Alternatives of a teacher to each token: token_N_K, int32, -1 where there are fewer; share_N_K, float32.

    A row of shares adds up to 1, or to 0 where the teacher said nothing; the share of a -1 is 0.
    """

    token_N_K: mx.array
    share_N_K: mx.array

    @property
    def present_N(self) -> mx.array:
        """1 where the teacher said something, else 0."""
        return mx.any(self.share_N_K > 0, axis=-1).astype(mx.float32)


class SampledTokens(NamedTuple):
    """Tokens that were sampled, and from what; see `token_scores`.

    support_N_K: None where the whole vocabulary could be sampled. temperature_N: above 0, float32; None where every token
    has the distribution's. teacher: None where there is none.
    """

    target_N: mx.array
    support_N_K: mx.array | None
    distribution: SamplingDistribution
    temperature_N: mx.array | None = None
    teacher: Teacher | None = None

    def at(self, rows: slice) -> SampledTokens:
        """Some of them."""
        return SampledTokens(
            self.target_N[rows],
            None if self.support_N_K is None else self.support_N_K[rows],
            self.distribution,
            None if self.temperature_N is None else self.temperature_N[rows],
            None if self.teacher is None else Teacher(*(array[rows] for array in self.teacher)),
        )

    @property
    def inverse_temperature(self) -> float | mx.array:
        """1 / T of each token: one number, or (N,)."""
        return 1.0 / (self.distribution.temperature if self.temperature_N is None else self.temperature_N)

    def scaled(self, logits_N_V: mx.array, among_N_K: mx.array | None) -> mx.array:
        """Scaled logits (logits + bias) / T, float32, of the whole vocabulary or of some tokens; -1 has the lowest."""
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
        """Where the targets stand among the scaled logits of the support: (N, 1)."""
        if self.support_N_K is None:
            return self.target_N[:, None]
        return mx.argmax(self.support_N_K == self.target_N[:, None], axis=-1, keepdims=True)


__all__ = [
    "SampledTokens",
    "SamplingDistribution",
    "Teacher",
    "TokenScores",
    "Totals",
    "score",
    "scoring",
    "token_scores",
]

LANES = 512
"""Rows are cut into stretches of so many numbers, which are reduced lane by lane, and then the lanes."""


class TokenScores(NamedTuple):
    """Per completion token, float32 nats: log-probability of the token, entropy of the distribution it came from.

    cross_entropy_N: of the teacher's alternatives under the policy, 0 where the teacher said nothing; None without one.
    """

    logp_N: mx.array
    entropy_N: mx.array
    cross_entropy_N: mx.array | None = None


class Totals(NamedTuple):
    """What a forward pass leaves to the backward pass: (N,) float32. Also, in this order, their cotangents.

    Without a teacher its cross-entropy is 0.
    """

    logp_N: mx.array
    entropy_N: mx.array
    logsumexp_N: mx.array
    cross_entropy_N: mx.array

    def at(self, rows: slice) -> Totals:
        """Those of some of the tokens."""
        return Totals(*(array[rows] for array in self))

    def scores(self, draws: SampledTokens) -> TokenScores:
        """What others see of them."""
        return TokenScores(self.logp_N, self.entropy_N, None if draws.teacher is None else self.cross_entropy_N)


def token_scores(
    logits_N_V: mx.array, target_N: mx.array, *, distribution: SamplingDistribution, support_N_K: mx.array | None = None
) -> TokenScores:
    """Log-probability of the targets, and exact entropy, under `distribution`; differentiable in the logits.

    logits_N_V: of any floating type. support_N_K: tokens (int32) that could be sampled, each once, the target among
    them; -1 is padding; None is the whole vocabulary. The entropy is in [0, log V], or [0, log K], up to rounding.
    """
    return score(logits_N_V, SampledTokens(target_N, support_N_K, distribution))


def score(logits_N_V: mx.array, draws: SampledTokens) -> TokenScores:
    """Score draws of any kind: see `token_scores`."""
    return Totals(*scoring(draws)(logits_N_V)).scores(draws)


def scoring(draws: SampledTokens, known: Totals | None = None) -> Callable[[mx.array], Totals]:
    """Function from logits (N, V) to totals; the log-sum-exp has no gradient.

    known: its result, where an earlier pass has found it: a backward pass is then spared the forward pass.
    """

    @mx.custom_function
    def totals(logits_N_V: mx.array) -> Totals:
        return _totals(logits_N_V, draws)[0]

    @totals.vjp
    def backward(logits_N_V: mx.array, cotangents: Sequence[mx.array], found: Sequence[mx.array]) -> mx.array:
        return _logits_gradient(logits_N_V, draws, Totals(*cotangents), known or Totals(*found))

    return cast(Callable[[mx.array], Totals], totals)


def slopes(logits_N_V: mx.array, draws: SampledTokens) -> tuple[Totals, mx.array]:
    """Totals, and T d log p_y / d logits, (N, V) in the type of the logits, for the exponentials of the former.

    SampledTokens from the whole vocabulary only, without a teacher.
    """
    totals, e_N_V, sum_N = _totals(logits_N_V, draws)
    at_target_N = 1.0 - exp(totals.logp_N)
    slope_N_V = mx.put_along_axis(e_N_V * (-1.0 / sum_N)[:, None], draws.target_column, at_target_N[:, None], axis=-1)
    return totals, slope_N_V.astype(logits_N_V.dtype)


def _totals(logits_N_V: mx.array, draws: SampledTokens) -> tuple[Totals, mx.array, mx.array]:
    """Totals; exponentials of the scaled logits, (N, M), each row's largest being 1; and their sums."""
    z_N_M = draws.scaled(logits_N_V, draws.support_N_K)
    largest_N_1 = _row_max(z_N_M)
    z_N_M = z_N_M - largest_N_1
    e_N_M = exp(z_N_M)
    sum_N = _row_sums(e_N_M)
    relative_N = mx.log(sum_N)
    logp_N = mx.take_along_axis(z_N_M, draws.target_column, axis=-1)[:, 0] - relative_N
    entropy_N = relative_N - _row_sums(e_N_M * z_N_M) / sum_N
    logsumexp_N = relative_N + largest_N_1[:, 0]
    totals = Totals(logp_N, entropy_N, logsumexp_N, _cross_entropy(logits_N_V, draws, logsumexp_N))
    return totals, e_N_M, sum_N


def _cross_entropy(logits_N_V: mx.array, draws: SampledTokens, logsumexp_N: mx.array) -> mx.array:
    """C; logsumexp_N: over the support."""
    teacher = draws.teacher
    if teacher is None:
        return mx.zeros_like(logsumexp_N)
    whole_N = logsumexp_N if draws.support_N_K is None else _logsumexp(draws.scaled(logits_N_V, None))
    return mx.sum(teacher.share_N_K * (whole_N[:, None] - draws.scaled(logits_N_V, teacher.token_N_K)), axis=-1)


def _logits_gradient(logits_N_V: mx.array, draws: SampledTokens, cotangents: Totals, totals: Totals) -> mx.array:
    """The closed form, as p (slope log p + offset); at the target it is replaced as a whole."""
    g_logp_N, g_entropy_N, g_cross_N = (
        cotangent_N * draws.inverse_temperature
        for cotangent_N in (cotangents.logp_N, cotangents.entropy_N, cotangents.cross_entropy_N)
    )
    slope_N, offset_N = -g_entropy_N, -(g_logp_N + g_entropy_N * totals.entropy_N)
    if draws.teacher is not None:
        g_cross_N = g_cross_N * draws.teacher.present_N
        if draws.support_N_K is None:
            offset_N = offset_N + g_cross_N
    logp_N_M = draws.scaled(logits_N_V, draws.support_N_K) - totals.logsumexp_N[:, None]
    gradient_N_M = exp(logp_N_M) * (slope_N[:, None] * logp_N_M + offset_N[:, None])
    target_N = g_logp_N + exp(totals.logp_N) * (slope_N * totals.logp_N + offset_N)
    gradient_N_M = mx.put_along_axis(gradient_N_M, draws.target_column, target_N[:, None], axis=-1)
    rows_N_1 = mx.arange(logits_N_V.shape[0])[:, None]
    if draws.support_N_K is not None:
        outside_N_V = _beyond_the_support(logits_N_V, draws, g_cross_N)
        gradient_N_M = outside_N_V.at[rows_N_1, mx.maximum(draws.support_N_K, 0)].add(gradient_N_M)
    if draws.teacher is not None:
        pulled_N_K = g_cross_N[:, None] * draws.teacher.share_N_K
        gradient_N_M = gradient_N_M.at[rows_N_1, mx.maximum(draws.teacher.token_N_K, 0)].subtract(pulled_N_K)
    return gradient_N_M.astype(logits_N_V.dtype)


def _beyond_the_support(logits_N_V: mx.array, draws: SampledTokens, g_cross_N: mx.array) -> mx.array:
    """What tokens outside the support feel too, (N, V): the cross-entropy's s p, nothing without a teacher."""
    if draws.teacher is None:
        return mx.zeros(logits_N_V.shape)
    z_N_V = draws.scaled(logits_N_V, None)
    return exp(z_N_V - _logsumexp(z_N_V)[:, None]) * g_cross_N[:, None]


def _logsumexp(z_N_V: mx.array) -> mx.array:
    largest_N_1 = _row_max(z_N_V)
    return mx.log(_row_sums(exp(z_N_V - largest_N_1))) + largest_N_1[:, 0]


def _row_max(x_N_M: mx.array) -> mx.array:
    """Largest number of each row, (N, 1)."""
    whole = x_N_M.shape[-1] // LANES * LANES
    if whole:
        lanes_N_L = mx.max(mx.unflatten(x_N_M[:, :whole], -1, (-1, LANES)), axis=-2)
        x_N_M = mx.concatenate([lanes_N_L, x_N_M[:, whole:]], axis=-1)
    return mx.max(x_N_M, axis=-1, keepdims=True)


def _row_sums(x_N_M: mx.array) -> mx.array:
    """Sum over the last axis in two stages: one after the other, as the CPU backend adds, a vocabulary is 1e-4 off.

    Across the lanes, the CPU backend reduces several numbers at once.
    """
    whole = x_N_M.shape[-1] // LANES * LANES
    rest_N = mx.sum(x_N_M[:, whole:], axis=-1)
    if not whole:
        return rest_N
    return rest_N + mx.sum(mx.sum(mx.unflatten(x_N_M[:, :whole], -1, (-1, LANES)), axis=-2), axis=-1)
