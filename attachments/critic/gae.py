"""Generalized advantage estimation, and how well values explain returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def generalized_advantages(value_T: Array, reward: float, *, discount: float, gae_lambda: float) -> Array:
    """Return the advantage of each token: (T,) float64.

    A_t = sum_k (gamma lambda)^k d_{t+k}, d_t = r_t + gamma V_{t+1} - V_t: GAE (arXiv:1506.02438), equation 16. The
    reward is that of the last token, after which the value is 0. value_T: V_t, of the state before token t.
    """
    advantage_T = np.empty_like(value_T)
    later, following = 0.0, 0.0
    for t in reversed(range(len(value_T))):
        earned = reward if t == len(value_T) - 1 else 0.0
        later = earned + discount * following - value_T[t] + discount * gae_lambda * later
        advantage_T[t], following = later, value_T[t]
    return advantage_T


def normalized(rows: Sequence[Array]) -> list[Array]:
    """Return the advantages less their mean, divided by their standard deviation (plus 1e-8), over all tokens."""
    whole_M = np.concatenate(rows) if rows else np.empty(0)
    mean, deviation = (float(whole_M.mean()), float(whole_M.std())) if whole_M.size else (0.0, 0.0)
    return [(row_T - mean) / (deviation + 1e-8) for row_T in rows]


def explained_variance(value_M: Array, return_M: Array) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 for exact values, 0 for a constant, below 0 for worse ones.

    None if all returns are equal.
    """
    variance = float(return_M.var()) if return_M.size else 0.0
    return 1.0 - float((return_M - value_M).var()) / variance if variance > 0 else None
