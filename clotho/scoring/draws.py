"""Tokens that were drawn, the law they were drawn from, and what a teacher would have said in their place."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

LOWEST_LOGIT = -1e9
"""Logits below it (minus infinity, for words that a model never says) count as this: the entropy stays finite."""


class SampledLaw(NamedTuple):
    """The distribution tokens were drawn from: softmax((logits + bias) / temperature) over the support.

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


class Draws(NamedTuple):
    """Tokens that were drawn, and from what; see `token_scores`.

    support_N_K: None where the whole vocabulary could be drawn. temperature_N: above 0, float32; None where every token
    has the law's. teacher: None where there is none.
    """

    target_N: mx.array
    support_N_K: mx.array | None
    law: SampledLaw
    temperature_N: mx.array | None = None
    teacher: Teacher | None = None

    def at(self, rows: slice) -> Draws:
        """Some of them."""
        return Draws(
            self.target_N[rows],
            None if self.support_N_K is None else self.support_N_K[rows],
            self.law,
            None if self.temperature_N is None else self.temperature_N[rows],
            None if self.teacher is None else Teacher(*(array[rows] for array in self.teacher)),
        )

    @property
    def inverse_temperature(self) -> float | mx.array:
        """1 / T of each token: one number, or (N,)."""
        return 1.0 / (self.law.temperature if self.temperature_N is None else self.temperature_N)

    def scaled(self, logits_N_V: mx.array, among_N_K: mx.array | None) -> mx.array:
        """Scaled logits (logits + bias) / T, float32, of the whole vocabulary or of some tokens; -1 has the lowest."""
        token_N_K = None if among_N_K is None else mx.maximum(among_N_K, 0)
        chosen_N_M = logits_N_V if token_N_K is None else mx.take_along_axis(logits_N_V, token_N_K, axis=-1)
        z_N_M = chosen_N_M.astype(mx.float32)
        if self.law.logit_bias:
            tokens, addends = zip(*self.law.logit_bias, strict=True)
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
