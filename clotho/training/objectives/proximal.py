"""The proximal policy without a pass of its own: between sampler and learner, by versions."""

from __future__ import annotations

import mlx.core as mx


def interpolated_proximal(
    logp_current_N: mx.array,
    behaviour_N: mx.array,
    version_behaviour_N: mx.array,
    version_proximal: float,
    version_current: float,
) -> mx.array:
    """Approximate log-probabilities of the learner at the start of the batch: (N,), without gradient.

    log pi_prox = log mu + alpha (log pi - log mu), alpha = (v_prox - v_mu) / (v_pi - v_mu), with the version v_mu that
    drew the token: AReaL's log-linear approximation (its documentation, algorithms/prox_approx). Versions may be
    fractional: within an update of K optimizer steps the k-th gradient is at v_prox + k / K. Where v_pi = v_mu alpha
    is 1, the current policy itself: no ratio, no clipping. At v_pi = v_prox, the first step of an update, alpha is 1
    and the result exact. alpha is held to [0, 1].
    """
    behind_N = version_proximal - version_behaviour_N.astype(mx.float32)
    age_N = behind_N + (version_current - version_proximal)
    alpha_N = mx.where(age_N == 0, 1.0, mx.clip(behind_N / mx.where(age_N == 0, 1.0, age_N), 0.0, 1.0))
    return behaviour_N + alpha_N * (mx.stop_gradient(logp_current_N) - behaviour_N)
