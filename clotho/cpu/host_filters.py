"""Top-p, top-k and min-p in NumPy, the twin of `filters`: no more is sorted than the largest top-k of any row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clotho.inference.filters import PADDING
from clotho.inference.sampling_params import Filters


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
