"""From logits to tokens, and to the log-probability of each token under the distribution it was sampled from.

All functions take a batch of logits (B, V) in float32 and stay on the device. What a batch does not use costs nothing:
a plan without filters never sorts, one without penalties keeps no table of seen tokens, and the only exponential over
the vocabulary is the one that sampling needs. Supports are collected for the rows that record them and no others.

Top-p, top-k and min-p: which tokens may be sampled, as a mask and as numbers.

Random numbers that depend on nothing but (seed, position): a row draws the same whatever its neighbours do.

SplitMix64 (Steele, Lea, Flood, 2014) used as a counter-based generator: its finaliser hashes a counter.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.sampling_params import Filters, SamplingPlan

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


BLOCK = 128
"""Tokens per block of the two-stage draw."""

ONE_STAGE = 512
"""Vocabularies up to this size are sampled from in one stage."""


class Supports(NamedTuple):
    """Tokens that could have been sampled in the rows `row_R`, ascending, filled up with `filters.PADDING`; uint32."""

    row_R: mx.array
    token_R_K: mx.array


class Drawn(NamedTuple):
    """One token per row. `top_*` are (B, n), best first, where some row asked for alternatives.

    supports: where some row asked for them.
    """

    token_B: mx.array
    logp_B: mx.array
    top_token_B_N: mx.array | None = None
    top_logp_B_N: mx.array | None = None
    supports: Supports | None = None


def draw(logits_B_V: mx.array, uniform_B_2: mx.array | None, plan: SamplingPlan, seen_B_V: mx.array | None) -> Drawn:
    """Draw a token per row: argmax where the plan says greedy, else by inverse distribution function.

    Order: bias, repetition penalty, temperature, then top-p, top-k, min-p. A greedy row skips the last four, so its
    log-probability is that of the untempered distribution.
    uniform_B_2: two uniforms in (0, 1) per row; None where every row is greedy.
    seen_B_V: tokens of prompt and completion so far; None where no row is penalised.
    """
    x_B_V = adjust(logits_B_V.astype(mx.float32), plan, seen_B_V)
    if plan.filters is not None:
        x_B_V = mx.where(support(x_B_V, plan.filters), x_B_V, -mx.inf)
    peak_B_1 = mx.max(x_B_V, axis=-1, keepdims=True)
    weight_B_V = mx.exp(x_B_V - peak_B_1)
    if uniform_B_2 is None:
        token_B, total_B = mx.argmax(x_B_V, axis=-1), mx.sum(weight_B_V, axis=-1)
    else:
        token_B, total_B = choose(weight_B_V, uniform_B_2)
        if plan.greedy_B is not None:
            token_B = mx.where(plan.greedy_B, mx.argmax(x_B_V, axis=-1), token_B)
    token_B = token_B.astype(mx.int32)
    scale_B = peak_B_1[:, 0] + mx.log(total_B)
    logp_B = mx.take_along_axis(x_B_V, token_B[:, None], axis=-1)[:, 0] - scale_B
    sampled = Drawn(token_B, logp_B)
    if plan.top_logprobs:
        sampled = Drawn(token_B, logp_B, *alternatives(x_B_V - scale_B[:, None], plan.top_logprobs))
    if plan.recording is None:
        return sampled
    token_R_K = supported_tokens(x_B_V[plan.recording.row_R], plan.recording.width)
    return sampled._replace(supports=Supports(plan.recording.row_R, token_R_K))


def adjust(x_B_V: mx.array, plan: SamplingPlan, seen_B_V: mx.array | None) -> mx.array:
    """Apply bias, repetition penalty (CTRL, arXiv:1909.05858, eq. 4 with the sign rule) and temperature."""
    if plan.bias is not None:
        rows_B_1 = mx.arange(x_B_V.shape[0])[:, None]
        x_B_V = x_B_V.at[rows_B_1, plan.bias.token_B_K].add(plan.bias.value_B_K)
    if plan.penalty_B is not None and seen_B_V is not None:
        penalty_B_1 = plan.penalty_B[:, None]
        x_B_V = mx.where(seen_B_V, mx.where(x_B_V > 0, x_B_V / penalty_B_1, x_B_V * penalty_B_1), x_B_V)
    if plan.inverse_temperature_B is not None:
        x_B_V = x_B_V * plan.inverse_temperature_B[:, None]
    return x_B_V


def choose(weight_B_V: mx.array, uniform_B_2: mx.array) -> tuple[mx.array, mx.array]:
    """Draw one index per row with probability proportional to its weight; return it and the row's total weight.

    Large vocabularies are sampled from in two stages, a block and then a token of it, with an independent uniform each:
    no prefix sum over the vocabulary, and sums short enough for float32.
    """
    rows, vocabulary = weight_B_V.shape
    if vocabulary <= ONE_STAGE:
        return invert(weight_B_V, uniform_B_2[:, :1])
    if vocabulary % BLOCK:
        weight_B_V = mx.pad(weight_B_V, [(0, 0), (0, BLOCK - vocabulary % BLOCK)])
    weight_B_N_K = weight_B_V.reshape(rows, -1, BLOCK)
    block_B, total_B = invert(mx.sum(weight_B_N_K, axis=-1), uniform_B_2[:, :1])
    inside_B_K = mx.take_along_axis(weight_B_N_K, block_B[:, None, None], axis=1)[:, 0]
    return block_B * BLOCK + invert(inside_B_K, uniform_B_2[:, 1:])[0], total_B


def invert(weight_B_N: mx.array, uniform_B_1: mx.array) -> tuple[mx.array, mx.array]:
    """Invert the distribution function of each row: the first index whose prefix sum exceeds uniform x total.

    Never an index of weight zero: should rounding leave none above the target, the heaviest is taken.
    """
    prefix_B_N = mx.cumsum(weight_B_N, axis=-1)
    total_B_1 = prefix_B_N[:, -1:]
    hit_B_N = (prefix_B_N > uniform_B_1 * total_B_1) & (weight_B_N > 0)
    index_B = mx.where(mx.any(hit_B_N, axis=-1), mx.argmax(hit_B_N, axis=-1), mx.argmax(weight_B_N, axis=-1))
    return index_B, total_B_1[:, 0]


def alternatives(logp_B_V: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` likeliest tokens per row and their log-probabilities, best first, ties by lower token id."""
    count = min(count, logp_B_V.shape[-1])
    token_B_N = mx.argsort(-logp_B_V, axis=-1)[:, :count]
    return token_B_N, mx.take_along_axis(logp_B_V, token_B_N, axis=-1)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST, SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

MANTISSA_BITS = 23
"""Mid-points of 2**23 equal cells are exact in float32 and lie strictly inside (0, 1)."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def uniforms(seed_B: NDArray[np.uint64], position_B: NDArray[np.int64], lanes: int = 2) -> NDArray[np.float32]:
    """Return `lanes` independent uniforms per row, shape (B, lanes), float32, each in [2**-24, 1 - 2**-24].

    A pure function of (seed, position, lane): position is the index of the token within its completion.
    """
    counter_B_L = position_B.astype(np.uint64)[:, None] * np.uint64(lanes) + np.arange(1, lanes + 1, dtype=np.uint64)
    word_B_L = mix(np.add(mix(seed_B)[:, None], counter_B_L * GOLDEN, dtype=np.uint64))
    cell_B_L = (word_B_L >> np.uint64(64 - MANTISSA_BITS)).astype(np.float32)
    return (cell_B_L + np.float32(0.5)) * np.float32(2.0**-MANTISSA_BITS)
