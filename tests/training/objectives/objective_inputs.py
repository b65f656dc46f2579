"""Inputs of objectives by hand and at random, and the loss and gradient of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from clotho.settings.learner import LearnerSection
from clotho.training.objectives.contract import Objective, ObjectiveInputs

OLD_LOGP = -2.0
"""Log-probability of every token under anchor and sampler, where a test does not say otherwise."""


class ObjectiveResult(NamedTuple):
    """Per token: the loss, the gradient of the sum of all trained losses, and whether the ratio was clipped."""

    loss_N: NDArray[np.float64]
    gradient_N: NDArray[np.float64]
    clipped_N: NDArray[np.bool_]


def float_array(values: ArrayLike) -> mx.array:
    """Return a float32 array."""
    return mx.array(np.asarray(values, dtype=np.float32))


def tokens(
    advantage_N: Sequence[float],
    *,
    old_logp_N: ArrayLike | None = None,
    rollout_logp_N: ArrayLike | None = None,
    loss_mask_N: ArrayLike | None = None,
    sequence_N: Sequence[int] | None = None,
) -> ObjectiveInputs:
    """Return trained tokens of one completion. The default old and rollout log-probability is OLD_LOGP."""
    N = len(advantage_N)
    old_logp_N = [OLD_LOGP] * N if old_logp_N is None else old_logp_N
    sequence_N = [0] * N if sequence_N is None else sequence_N
    return ObjectiveInputs(
        old_logp_N=float_array(old_logp_N),
        rollout_logp_N=float_array(old_logp_N if rollout_logp_N is None else rollout_logp_N),
        advantage_N=float_array(advantage_N),
        loss_mask_N=float_array([1.0] * N if loss_mask_N is None else loss_mask_N),
        sequence_N=mx.array(list(sequence_N), dtype=mx.int32),
        sequences=max(sequence_N) + 1,
        group_B=mx.arange(max(sequence_N) + 1),
    )


def select_tokens(tokens: ObjectiveInputs, index_N: ArrayLike, new_B: ArrayLike) -> ObjectiveInputs:
    """Return the tokens at these indices in this order. Completion i becomes completion new_B[i]."""
    at_N = mx.array(np.asarray(index_N))
    return ObjectiveInputs(
        old_logp_N=tokens.old_logp_N[at_N],
        rollout_logp_N=tokens.rollout_logp_N[at_N],
        advantage_N=tokens.advantage_N[at_N],
        loss_mask_N=tokens.loss_mask_N[at_N],
        sequence_N=mx.array(np.asarray(new_B))[tokens.sequence_N[at_N]],
        sequences=tokens.sequences,
        group_B=tokens.group_B,
    )


def at_ratio(ratio_N: ArrayLike) -> mx.array:
    """Return log-probabilities with these ratios to OLD_LOGP."""
    return float_array(OLD_LOGP + np.log(np.asarray(ratio_N, dtype=np.float64)))


def evaluate_objective(
    objective: Objective,
    logp_N: mx.array,
    tokens: ObjectiveInputs,
    settings: LearnerSection,
    loss_weight_N: ArrayLike | None = None,
) -> ObjectiveResult:
    """Return the loss of every token and the gradient of their weighted sum. The default weight is 1."""
    share_N = tokens.loss_mask_N if loss_weight_N is None else tokens.loss_mask_N * float_array(loss_weight_N)
    result = objective(logp_N, tokens, settings.objective)
    gradient_N = mx.grad(lambda logp_N: mx.sum(share_N * objective(logp_N, tokens, settings.objective).loss_N))(logp_N)
    return ObjectiveResult(
        np.array(result.loss_N, dtype=np.float64),
        np.array(gradient_N, dtype=np.float64),
        np.array(result.clipped_N).astype(bool),
    )


def random_tokens(N: int, *, seed: int = 0, sequences: int = 3) -> tuple[mx.array, ObjectiveInputs]:
    """Return random tokens with ratios around 1 and one advantage per completion. The last two are not trained on."""
    rng = np.random.default_rng(seed)
    logp_N = -np.abs(rng.normal(size=N)) - 0.3
    sequence_N = [int(i) for i in np.sort(rng.integers(0, sequences, N))]
    sequence_N[-1] = sequences - 1
    old_logp_N = logp_N + 0.3 * rng.normal(size=N)
    advantage_B = rng.normal(size=sequences)
    loss_mask_N = (np.arange(N) < N - 2).astype(np.float64)
    rollout_logp_N = old_logp_N + 0.1 * rng.normal(size=N)
    made = tokens(
        advantage_B[sequence_N].tolist(),
        old_logp_N=old_logp_N,
        rollout_logp_N=rollout_logp_N,
        loss_mask_N=loss_mask_N,
        sequence_N=sequence_N,
    )
    return float_array(logp_N), made
