"""Top-p, top-k and min-p: which tokens may be drawn, as a mask and as numbers."""

from __future__ import annotations

import mlx.core as mx

from clotho.inference.sampling_params import Filters

PADDING = 2**32 - 1
"""Stands behind a row's tokens in an array of supports; no token's number."""


def support(x_B_V: mx.array, filters: Filters) -> mx.array:
    """Say which tokens survive top-p, top-k and min-p: of each row the n likeliest, ties by lower token id.

    Each filter keeps a prefix of the tokens in order of probability, so all three together keep the shortest:
    top-p the fewest whose probabilities reach p, top-k the first k, min-p those of at least min_p x the largest.
    """
    sorted_B_V = -mx.sort(-x_B_V, axis=-1)
    count_B_1 = filters.top_k_B[:, None]
    prob_B_V = mx.softmax(sorted_B_V, axis=-1)
    before_B_V = mx.cumsum(prob_B_V, axis=-1) - prob_B_V
    count_B_1 = mx.minimum(count_B_1, mx.sum(before_B_V < filters.top_p_B[:, None], axis=-1, keepdims=True))
    floor_B_1 = filters.min_p_B[:, None] * prob_B_V[:, :1]
    count_B_1 = mx.maximum(mx.minimum(count_B_1, mx.sum(prob_B_V >= floor_B_1, axis=-1, keepdims=True)), 1)
    last_B_1 = mx.take_along_axis(sorted_B_V, count_B_1 - 1, axis=-1)
    above_B_V = x_B_V > last_B_1
    tie_B_V = x_B_V == last_B_1
    spare_B_1 = count_B_1 - mx.sum(above_B_V, axis=-1, keepdims=True)
    return above_B_V | (tie_B_V & (mx.cumsum(tie_B_V.astype(mx.int32), axis=-1) <= spare_B_1))


def supported_tokens(x_R_V: mx.array, width: int) -> mx.array:
    """Return the tokens of each row whose logit is not minus infinity, at most `width` of them.

    (R, width), uint32, ascending, filled up with `PADDING`.
    """
    number_V = mx.arange(x_R_V.shape[-1], dtype=mx.uint32)
    token_R_V = mx.where(x_R_V > -mx.inf, number_V, mx.array(PADDING, dtype=mx.uint32))
    return mx.sort(mx.partition(token_R_V, width - 1, axis=-1)[:, :width], axis=-1)
