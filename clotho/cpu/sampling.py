"""The draw in NumPy, for the CPU backend: there MLX's exponentials and sorts take ten to a hundred times as long.

Same algorithm and same uniforms as `sampling.draw`, its twin in the tests. Waiting for the logits costs nothing on
the CPU, where a launch returns when most of its work is done.

Top-p, top-k and min-p in NumPy, the twin of `filters`: no more is sorted than the largest top-k of any row.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from clotho.inference.sampling import BLOCK, ONE_STAGE, PADDING, Drawn, Supports
from clotho.inference.sampling_params import Filters, SamplingPlan


def filter_on_host(x_B_V: NDArray[np.float32], filters: Filters) -> None:
    """Set the logits of tokens that do not survive to minus infinity, in place. Rows without filters cost nothing."""
    vocabulary = x_B_V.shape[1]
    top_p_B, top_k_B, min_p_B = np.array(filters.top_p_B), np.array(filters.top_k_B), np.array(filters.min_p_B)
    row_F = np.flatnonzero(np.isfinite(top_p_B) | (top_k_B < vocabulary) | (min_p_B > 0.0))
    if not row_F.size:  # a min-p too small for float32
        return
    x_F_V, top_k_F_1 = x_B_V[row_F], top_k_B[row_F, None]
    width = int(top_k_F_1.max())
    top_F_W = np.sort(np.partition(x_F_V, vocabulary - width, axis=-1)[:, vocabulary - width :], axis=-1)[:, ::-1]
    prob_F_W = _probabilities(top_F_W, x_F_V)
    before_F_W = np.cumsum(prob_F_W, axis=-1) - prob_F_W
    count_F_1 = np.minimum(top_k_F_1, np.count_nonzero(before_F_W < top_p_B[row_F, None], axis=-1, keepdims=True))
    floor_F_1 = min_p_B[row_F, None] * prob_F_W[:, :1]
    count_F_1 = np.minimum(count_F_1, np.count_nonzero(prob_F_W >= floor_F_1, axis=-1, keepdims=True))
    count_F_1 = np.maximum(count_F_1, 1)
    last_F_1 = np.take_along_axis(top_F_W, count_F_1 - 1, axis=-1)
    dropped_F_V = x_F_V < last_F_1
    _drop_late_ties(dropped_F_V, x_F_V, last_F_1[:, 0], count_F_1[:, 0])
    x_F_V[dropped_F_V] = -np.inf
    x_B_V[row_F] = x_F_V


def _probabilities(top_F_W: NDArray[np.float32], x_F_V: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probabilities, under the whole softmax, of the likeliest tokens, which come best first."""
    peak_F_1 = top_F_W[:, :1]
    weight_F_V = x_F_V - peak_F_1
    total_F_1 = np.exp(weight_F_V, out=weight_F_V).sum(axis=-1, keepdims=True)
    prob_F_W: NDArray[np.float32] = np.exp(top_F_W - peak_F_1) / total_F_1
    return prob_F_W


def _drop_late_ties(
    dropped_F_V: NDArray[np.bool_], x_F_V: NDArray[np.float32], last_F: NDArray[np.float32], count_F: NDArray[np.int64]
) -> None:
    """Among equal logits at the edge keep the lower token ids, so that exactly `count_F` tokens remain."""
    surplus_F = dropped_F_V.shape[1] - np.count_nonzero(dropped_F_V, axis=-1) - count_F
    for row in np.flatnonzero(surplus_F > 0):
        tie_N = np.flatnonzero(x_F_V[row] == last_F[row])
        dropped_F_V[row, tie_N[-surplus_F[row] :]] = True


def supported_on_host(x_R_V: NDArray[np.float32], width: int) -> NDArray[np.uint32]:
    """Return the tokens of each row whose logit is not minus infinity, as `filters.supported_tokens` does."""
    row_N, token_N = np.nonzero(x_R_V > -np.inf)
    token_R_K = np.full((len(x_R_V), width), PADDING, dtype=np.uint32)
    first_R = np.searchsorted(row_N, np.arange(len(x_R_V)))
    token_R_K[row_N, np.arange(len(row_N)) - first_R[row_N]] = token_N
    return token_R_K


def can_draw_on_host(plan: SamplingPlan) -> bool:
    """Say whether the plan is within what `draw_on_host` knows, and the backend is the CPU.

    It knows all but repetition penalties, whose table of seen tokens is the device's, and alternatives.
    """
    return plan.penalty_B is None and not plan.top_logprobs and mx.default_device() == mx.Device(mx.cpu)


def draw_on_host(x_B_V: NDArray[np.float32], uniform_B_2: NDArray[np.float32] | None, plan: SamplingPlan) -> Drawn:
    """Draw a token per row and report its log-probability, as `sampling.draw` does; uses up the logits."""
    _adjust(x_B_V, plan)
    x_B_V -= x_B_V.max(axis=-1, keepdims=True)
    weight_B_V = np.exp(x_B_V)
    if uniform_B_2 is None:
        token_B, total_B = x_B_V.argmax(axis=-1), weight_B_V.sum(axis=-1)
    else:
        token_B, total_B = _choose(weight_B_V, uniform_B_2)
        if plan.greedy_B is not None:
            token_B = np.where(np.array(plan.greedy_B), x_B_V.argmax(axis=-1), token_B)
    logp_B = x_B_V[np.arange(len(token_B)), token_B] - np.log(total_B)
    sampled = Drawn(mx.array(token_B.astype(np.int32)), mx.array(logp_B.astype(np.float32)))
    if plan.recording is None:
        return sampled
    x_R_V = x_B_V[np.array(plan.recording.row_R)]
    token_R_K = mx.array(supported_on_host(x_R_V, plan.recording.width))
    return sampled._replace(supports=Supports(plan.recording.row_R, token_R_K))


def _adjust(x_B_V: NDArray[np.float32], plan: SamplingPlan) -> None:
    """Turn logits into those after bias, temperature and filters."""
    if plan.bias is not None:
        at_B_1 = np.arange(len(x_B_V))[:, None]
        np.add.at(x_B_V, (at_B_1, np.array(plan.bias.token_B_K)), np.array(plan.bias.value_B_K))
    if plan.inverse_temperature_B is not None:
        x_B_V *= np.array(plan.inverse_temperature_B)[:, None]
    if plan.filters is not None:
        filter_on_host(x_B_V, plan.filters)


def _choose(
    weight_B_V: NDArray[np.float32], uniform_B_2: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    vocabulary = weight_B_V.shape[1]
    if vocabulary <= ONE_STAGE:
        return _invert(weight_B_V, uniform_B_2[:, :1])
    starts_N = np.arange(0, vocabulary, BLOCK)
    block_B, total_B = _invert(np.add.reduceat(weight_B_V, starts_N, axis=-1), uniform_B_2[:, :1])
    inside_B_K = block_B[:, None] * BLOCK + np.arange(BLOCK)
    exists_B_K = inside_B_K < vocabulary
    weight_B_K = np.take_along_axis(weight_B_V, np.where(exists_B_K, inside_B_K, 0), axis=-1) * exists_B_K
    return block_B * BLOCK + _invert(weight_B_K, uniform_B_2[:, 1:])[0], total_B


def _invert(
    weight_B_N: NDArray[np.float32], uniform_B_1: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    prefix_B_N = np.cumsum(weight_B_N, axis=-1)
    total_B_1 = prefix_B_N[:, -1:]
    hit_B_N = (prefix_B_N > uniform_B_1 * total_B_1) & (weight_B_N > 0)
    index_B = np.where(hit_B_N.any(axis=-1), hit_B_N.argmax(axis=-1), weight_B_N.argmax(axis=-1))
    return index_B, total_B_1[:, 0]
