"""Sampling in NumPy: the same algorithm and the same uniforms as `clotho.inference.sampling.sample`.

On the CPU, exponentials and sorts of MLX take ten to a hundred times as long. Waiting for the logits costs nothing
there, because a launch returns when most of its work is done. Tests compare both implementations.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.rows import BLOCK, ONE_STAGE, PADDING, Filters, RowParameters, SampledRows, Supports, TokenMasks


def apply_filters(x_B_V: NDArray[np.float32], filters: Filters) -> None:
    """Set the logits of excluded tokens to minus infinity, in place. Only rows with filters are computed.

    Sorts no more tokens than the largest top-k of any row.
    """
    vocabulary = x_B_V.shape[1]
    row_F, top_p_F_1 = np.array(filters.row_R), np.array(filters.top_p_R)[:, None]
    top_k_F_1, min_p_F_1 = np.array(filters.top_k_R)[:, None], np.array(filters.min_p_R)[:, None]
    x_F_V = x_B_V[row_F]
    width = int(top_k_F_1.max())
    top_F_W = np.sort(np.partition(x_F_V, vocabulary - width, axis=-1)[:, vocabulary - width :], axis=-1)[:, ::-1]
    prob_F_W = _probabilities(top_F_W, x_F_V)
    before_F_W = np.cumsum(prob_F_W, axis=-1) - prob_F_W
    count_F_1 = np.minimum(top_k_F_1, np.count_nonzero(before_F_W < top_p_F_1, axis=-1, keepdims=True))
    floor_F_1 = min_p_F_1 * prob_F_W[:, :1]
    count_F_1 = np.minimum(count_F_1, np.count_nonzero(prob_F_W >= floor_F_1, axis=-1, keepdims=True))
    count_F_1 = np.maximum(count_F_1, 1)
    last_F_1 = np.take_along_axis(top_F_W, count_F_1 - 1, axis=-1)
    excluded_F_V = x_F_V < last_F_1
    _exclude_surplus_ties(excluded_F_V, x_F_V, last_F_1[:, 0], count_F_1[:, 0])
    x_F_V[excluded_F_V] = -np.inf
    x_B_V[row_F] = x_F_V


def _probabilities(top_F_W: NDArray[np.float32], x_F_V: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the probabilities, over the whole vocabulary, of the most probable tokens, in descending order."""
    peak_F_1 = top_F_W[:, :1]
    weight_F_V = x_F_V - peak_F_1
    total_F_1 = np.exp(weight_F_V, out=weight_F_V).sum(axis=-1, keepdims=True)
    prob_F_W: NDArray[np.float32] = np.exp(top_F_W - peak_F_1) / total_F_1
    return prob_F_W


def _exclude_surplus_ties(
    excluded_F_V: NDArray[np.bool_], x_F_V: NDArray[np.float32], last_F: NDArray[np.float32], count_F: NDArray[np.int64]
) -> None:
    """Of equal logits at the threshold keep those with the lowest identifiers, so that `count_F` tokens remain."""
    surplus_F = excluded_F_V.shape[1] - np.count_nonzero(excluded_F_V, axis=-1) - count_F
    for row in np.flatnonzero(surplus_F > 0):
        tie_N = np.flatnonzero(x_F_V[row] == last_F[row])
        excluded_F_V[row, tie_N[-surplus_F[row] :]] = True


def support_tokens(x_R_V: NDArray[np.float32], width: int) -> NDArray[np.uint32]:
    """Return the tokens of each row whose logit is not minus infinity, as `inference.sampling.support_tokens` does."""
    row_N, token_N = np.nonzero(x_R_V > -np.inf)
    token_R_K = np.full((len(x_R_V), width), PADDING, dtype=np.uint32)
    first_R = np.searchsorted(row_N, np.arange(len(x_R_V)))
    token_R_K[row_N, np.arange(len(row_N)) - first_R[row_N]] = token_N
    return token_R_K


def can_sample(parameters: RowParameters) -> bool:
    """Whether `sample_on_host` applies: without repetition penalty and without alternatives."""
    return parameters.penalty_B is None and parameters.alternatives is None


def sample_on_host(
    x_B_V: NDArray[np.float32],
    uniform_B_2: NDArray[np.float32] | None,
    parameters: RowParameters,
    *,
    sampled_R_T: Sequence[NDArray[np.int32]] = (),
    masks: TokenMasks | None = None,
) -> SampledRows:
    """Sample one token per row; see `RowSampler`."""
    if masks is not None:
        _exclude_tokens(x_B_V, masks)
    _process_logits(x_B_V, parameters, sampled_R_T)
    x_B_V -= x_B_V.max(axis=-1, keepdims=True)
    weight_B_V = np.exp(x_B_V)
    if uniform_B_2 is None:
        token_B, total_B = x_B_V.argmax(axis=-1), weight_B_V.sum(axis=-1)
    else:
        token_B, total_B = _choose_token(weight_B_V, uniform_B_2)
        if parameters.greedy_B is not None:
            token_B = np.where(np.array(parameters.greedy_B), x_B_V.argmax(axis=-1), token_B)
    logp_B = x_B_V[np.arange(len(token_B)), token_B] - np.log(total_B)
    sampled = SampledRows(mx.array(token_B.astype(np.int32)), mx.array(logp_B.astype(np.float32)))
    if parameters.recording is None:
        return sampled
    x_R_V = x_B_V[np.array(parameters.recording.row_R)]
    token_R_K = mx.array(support_tokens(x_R_V, parameters.recording.number))
    return sampled._replace(supports=Supports(parameters.recording.row_R, token_R_K))


def _exclude_tokens(x_B_V: NDArray[np.float32], masks: TokenMasks) -> None:
    """Set the logits of tokens that may not be sampled to minus infinity, in place."""
    bytes_R_K = masks.word_R_W.astype("<u4", copy=False).view(np.uint8)
    allowed_R_V = np.unpackbits(bytes_R_K, axis=-1, count=x_B_V.shape[1], bitorder="little").view(np.bool_)
    for row, allowed_V in zip(masks.row_R.tolist(), allowed_R_V, strict=True):
        x_B_V[row, ~allowed_V] = -np.inf


def _process_logits(
    x_B_V: NDArray[np.float32], parameters: RowParameters, sampled_R_T: Sequence[NDArray[np.int32]]
) -> None:
    """Apply logit bias, penalties, temperature and filters in place."""
    if parameters.bias is not None:
        row_B_1 = np.arange(len(x_B_V))[:, None]
        np.add.at(x_B_V, (row_B_1, np.array(parameters.bias.token_B_K)), np.array(parameters.bias.value_B_K))
    if parameters.count_penalties is not None:
        for row, presence, frequency, token_T in zip(*parameters.count_penalties, sampled_R_T, strict=True):
            token_N, count_N = np.unique(token_T, return_counts=True)
            x_B_V[row, token_N] -= frequency * count_N.astype(np.float32)
            x_B_V[row, token_N] -= presence
    if parameters.inverse_temperature_B is not None:
        x_B_V *= np.array(parameters.inverse_temperature_B)[:, None]
    if parameters.filters is not None:
        apply_filters(x_B_V, parameters.filters)


def _choose_token(
    weight_B_V: NDArray[np.float32], uniform_B_2: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    vocabulary = weight_B_V.shape[1]
    if vocabulary <= ONE_STAGE:
        return _invert_cdf(weight_B_V, uniform_B_2[:, :1])
    block_start_N = np.arange(0, vocabulary, BLOCK)
    block_B, total_B = _invert_cdf(np.add.reduceat(weight_B_V, block_start_N, axis=-1), uniform_B_2[:, :1])
    inside_B_K = block_B[:, None] * BLOCK + np.arange(BLOCK)
    exists_B_K = inside_B_K < vocabulary
    weight_B_K = np.take_along_axis(weight_B_V, np.where(exists_B_K, inside_B_K, 0), axis=-1) * exists_B_K
    return block_B * BLOCK + _invert_cdf(weight_B_K, uniform_B_2[:, 1:])[0], total_B


def _invert_cdf(
    weight_B_N: NDArray[np.float32], uniform_B_1: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Invert the distribution function of each row, as `inference.sampling.invert_cdf` does.

    Prefix sums never decrease: the last one exceeds the target if any does, and the first one that does has a weight
    above 0.
    """
    prefix_B_N = np.cumsum(weight_B_N, axis=-1)
    total_B_1 = prefix_B_N[:, -1:]
    above_B_N = prefix_B_N > uniform_B_1 * total_B_1
    index_B = above_B_N.argmax(axis=-1)
    if not above_B_N[:, -1].all():
        index_B = np.where(above_B_N[:, -1], index_B, weight_B_N.argmax(axis=-1))
    return index_B, total_B_1[:, 0]
