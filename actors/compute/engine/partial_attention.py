"""Attention over some of the keys, and its union with attention over others.

Softmax over two sets of keys is the mean of the softmaxes over each, weighted by their sums of exponentials; so one
token's attention may be computed where its keys lie (Online softmax, arXiv:1805.02867; cascade inference).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from actors.compute.exponential import exp


class Partial(NamedTuple):
    """Not yet normalised. sum: of values times weights, (..., Q, size); peak: the highest score; weight: of all keys.

    Weights are exp(score - peak); peak and weight are (..., Q, 1), all three in float32.
    """

    sum: mx.array
    peak: mx.array
    weight: mx.array


def unseen(mask: mx.array) -> mx.array:
    """What, added to scores, hides those of keys where the mask is False: sums cost the CPU less than choices."""
    return (mask.astype(mx.float32) - 1.0) * 1e30


def attend_to(queries: mx.array, keys: mx.array, values: mx.array, hidden: mx.array | None) -> Partial:
    """Attention of scaled queries (..., Q, size) over keys and values (..., K, size).

    hidden: `unseen` of which keys each query sees, at least one; None = all.
    """
    score_Q_K = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if hidden is not None:
        score_Q_K = score_Q_K + hidden
    peak_Q_1 = mx.max(score_Q_K, axis=-1, keepdims=True)
    weight_Q_K = exp(score_Q_K - peak_Q_1)
    summed = (weight_Q_K.astype(values.dtype) @ values).astype(mx.float32)
    return Partial(summed, peak_Q_1, mx.sum(weight_Q_K, axis=-1, keepdims=True))


def united(one: Partial, other: Partial) -> mx.array:
    """Attention over the keys of both; a peak of minus infinity stands for no keys."""
    peak = mx.maximum(one.peak, other.peak)
    of_one, of_other = exp(one.peak - peak), exp(other.peak - peak)
    weight = of_one * one.weight + of_other * other.weight
    return (of_one * one.sum + of_other * other.sum) / weight
