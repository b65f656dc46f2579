"""Log-probability and entropy of drawn tokens from logits, with the backward pass in closed form.

Tokens are drawn from softmax((logits + bias) / temperature) over a support. With z its scaled logits,
L = log sum exp z and p = exp(z - L), in float32 and natural logs:

    log p_y = z_y - L         d log p_y / d z_i = [i = y] - p_i
    H = L - sum p z           d H       / d z_i = -p_i (log p_i + H)

So a backward pass needs three numbers per token beside the logits, and one exponential per logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from actors.compute.exponential import exp

LOWEST_LOGIT = -1e9
"""Logits below it (minus infinity, for words that a model never says) count as this: the entropy stays finite."""

STRETCH = 512
"""So many numbers are added up one after the other, and then the sums of such stretches."""


class SampledLaw(NamedTuple):
    """The distribution tokens were drawn from: softmax((logits + bias) / temperature) over the support.

    temperature: above 0. logit_bias: pairs of a token and what is added to its logit; no token twice.
    """

    temperature: float
    logit_bias: tuple[tuple[int, float], ...] = ()


class TokenScores(NamedTuple):
    """Per completion token, float32 nats: log-probability of the token, entropy of the distribution it came from."""

    logp_N: mx.array
    entropy_N: mx.array


class Totals(NamedTuple):
    """What a forward pass leaves to the backward pass: (N,) float32. Also, in this order, their cotangents."""

    logp_N: mx.array
    entropy_N: mx.array
    logsumexp_N: mx.array

    def at(self, rows: slice) -> Totals:
        """Those of some of the tokens."""
        return Totals(self.logp_N[rows], self.entropy_N[rows], self.logsumexp_N[rows])


class Draws(NamedTuple):
    """Tokens that were drawn, and from what; see `token_scores`."""

    target_N: mx.array
    support_N_K: mx.array | None
    law: SampledLaw

    def at(self, rows: slice) -> Draws:
        """Some of them."""
        return Draws(self.target_N[rows], None if self.support_N_K is None else self.support_N_K[rows], self.law)


def token_scores(
    logits_N_V: mx.array, target_N: mx.array, *, law: SampledLaw, support_N_K: mx.array | None = None
) -> TokenScores:
    """Log-probability of the targets, and exact entropy, under `law`; differentiable in the logits.

    logits_N_V: of any floating type. support_N_K: tokens (int32) that could be drawn, each once, the target among
    them; -1 is padding; None is the whole vocabulary. The entropy is in [0, log V], or [0, log K], up to rounding.
    """
    logp_N, entropy_N, _ = scoring(Draws(target_N, support_N_K, law))(logits_N_V)
    return TokenScores(logp_N, entropy_N)


def scoring(draws: Draws, known: Totals | None = None) -> Callable[[mx.array], Totals]:
    """Function from logits (N, V) to totals; the log-sum-exp has no gradient.

    known: its result, where an earlier pass has found it: a backward pass is then spared the forward pass.
    """

    @mx.custom_function
    def totals(logits_N_V: mx.array) -> Totals:
        return _totals(logits_N_V, draws)

    @totals.vjp
    def backward(logits_N_V: mx.array, cotangents: Sequence[mx.array], found: Sequence[mx.array]) -> mx.array:
        return _logits_gradient(logits_N_V, draws, Totals(*cotangents), known or Totals(*found))

    return cast(Callable[[mx.array], Totals], totals)


def _totals(logits_N_V: mx.array, draws: Draws) -> Totals:
    z_N_M = _scaled_logits(logits_N_V, draws)
    largest_N_1 = mx.max(z_N_M, axis=-1, keepdims=True)
    z_N_M = z_N_M - largest_N_1
    e_N_M = exp(z_N_M)
    sum_N = _row_sums(e_N_M)
    logsumexp_N = mx.log(sum_N)
    logp_N = mx.take_along_axis(z_N_M, _target_column(draws), axis=-1)[:, 0] - logsumexp_N
    entropy_N = logsumexp_N - _row_sums(e_N_M * z_N_M) / sum_N
    return Totals(logp_N, entropy_N, logsumexp_N + largest_N_1[:, 0])


def _logits_gradient(logits_N_V: mx.array, draws: Draws, cotangents: Totals, totals: Totals) -> mx.array:
    """The closed form, as p (slope log p + offset); at the target it is replaced as a whole."""
    g_logp_N, g_entropy_N = (cotangent_N / draws.law.temperature for cotangent_N in cotangents[:2])
    slope_N, offset_N = -g_entropy_N, -(g_logp_N + g_entropy_N * totals.entropy_N)
    logp_N_M = _scaled_logits(logits_N_V, draws) - totals.logsumexp_N[:, None]
    gradient_N_M = exp(logp_N_M) * (slope_N[:, None] * logp_N_M + offset_N[:, None])
    target_N = g_logp_N + exp(totals.logp_N) * (slope_N * totals.logp_N + offset_N)
    gradient_N_M = mx.put_along_axis(gradient_N_M, _target_column(draws), target_N[:, None], axis=-1)
    if draws.support_N_K is not None:
        rows_N_1 = mx.arange(logits_N_V.shape[0])[:, None]
        gradient_N_M = mx.zeros(logits_N_V.shape).at[rows_N_1, mx.maximum(draws.support_N_K, 0)].add(gradient_N_M)
    return gradient_N_M.astype(logits_N_V.dtype)


def _scaled_logits(logits_N_V: mx.array, draws: Draws) -> mx.array:
    """z, over the whole vocabulary or over the support; padding has the lowest logit."""
    law, support_N_K = draws.law, draws.support_N_K
    token_N_K = None if support_N_K is None else mx.maximum(support_N_K, 0)
    chosen_N_M = logits_N_V if token_N_K is None else mx.take_along_axis(logits_N_V, token_N_K, axis=-1)
    z_N_M = chosen_N_M.astype(mx.float32)
    if law.logit_bias:
        tokens, addends = zip(*law.logit_bias, strict=True)
        bias_V = mx.zeros(logits_N_V.shape[-1]).at[mx.array(tokens)].add(mx.array(addends, dtype=mx.float32))
        z_N_M = z_N_M + (bias_V if token_N_K is None else bias_V[token_N_K])
    z_N_M = mx.maximum(z_N_M * (1.0 / law.temperature), LOWEST_LOGIT)
    return z_N_M if support_N_K is None else mx.where(support_N_K < 0, LOWEST_LOGIT, z_N_M)


def _target_column(draws: Draws) -> mx.array:
    """Where the targets stand among the scaled logits: (N, 1)."""
    if draws.support_N_K is None:
        return draws.target_N[:, None]
    return mx.argmax(draws.support_N_K == draws.target_N[:, None], axis=-1, keepdims=True)


def _row_sums(x_N_M: mx.array) -> mx.array:
    """Sum over the last axis in two stages: one after the other, as the CPU backend adds, a vocabulary is 1e-4 off."""
    whole = x_N_M.shape[-1] // STRETCH * STRETCH
    rest_N = mx.sum(x_N_M[:, whole:], axis=-1)
    if not whole:
        return rest_N
    return rest_N + mx.sum(mx.sum(mx.unflatten(x_N_M[:, :whole], -1, (-1, STRETCH)), axis=-1), axis=-1)
