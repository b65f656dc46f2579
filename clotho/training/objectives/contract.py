"""The interface of objective functions.

N is the number of sampled tokens of the micro-batch, padding included; B is the number of its completions. A custom
objective has the same form, `objective(logp_N, tokens, settings) -> PolicyLoss`, and is selected by
`module:function` in `learner.objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx


class ObjectiveInputs(NamedTuple):
    """The sampled tokens of a micro-batch. Every array is (N,), float32 by default, without gradient.

    old_logp_N: log-probability in nats under the policy that the importance ratio is against
        (`learner.objective.ratio_reference`).
    rollout_logp_N: log-probability under the rollout policy, recorded when the token was sampled.
    advantage_N: advantage; equal for all tokens of a completion unless the environment gave advantages per token.
    loss_mask_N: loss mask: 1 for tokens that are trained on, 0 for other tokens and for padding.
    sequence_N: int32, index of the token's completion among the `sequences` completions (padding: 0).
    group_B: (B,) int32, index of the group of each completion among the groups of the micro-batch.
    reference_logp_N: log-probability under the reference policy; None without one.
    reference_point: estimate of KL(policy || reference) of whole completions, in nats; 0 where the objective has none.
    """

    old_logp_N: mx.array
    rollout_logp_N: mx.array
    advantage_N: mx.array
    loss_mask_N: mx.array
    sequence_N: mx.array
    sequences: int
    group_B: mx.array
    reference_logp_N: mx.array | None = None
    reference_point: float = 0.0

    def sum_B(self, value_N: mx.array) -> mx.array:
        """Return the sum over the trained tokens of each completion: (B,)."""
        return mx.zeros((self.sequences,), dtype=value_N.dtype).at[self.sequence_N].add(self.loss_mask_N * value_N)

    def mean_B(self, value_N: mx.array) -> mx.array:
        """Return the mean over the trained tokens of each completion: (B,); 0 for a completion without any."""
        return self.sum_B(value_N) / mx.maximum(self.sum_B(mx.ones_like(self.loss_mask_N)), 1.0)

    def spread_N(self, value_B: mx.array) -> mx.array:
        """Give every token the value of its completion: (N,)."""
        return value_B[self.sequence_N]

    def group_sum_B(self, value_B: mx.array) -> mx.array:
        """Give every completion the sum of the values of its group: (B,)."""
        return mx.zeros_like(value_B).at[self.group_B].add(value_B)[self.group_B]


class PolicyLoss(NamedTuple):
    """Result of an objective, per token (N,), before loss mask, importance correction and aggregation.

    loss_N: the loss, to be minimized. clipped_N: 1 or true for a token outside the trust region, whose gradient is zero
    or whose weight is reduced; it is only counted and carries no gradient.
    means: metrics of the objective, under the names of `UpdateMetrics`: values, and 1 for those that the mean is over.
    """

    loss_N: mx.array
    clipped_N: mx.array
    means: Mapping[str, tuple[mx.array, mx.array]] = MappingProxyType({})


Objective = Callable[[mx.array, ObjectiveInputs, Any], PolicyLoss]
"""objective(log pi with gradient (N,), tokens, settings) -> PolicyLoss."""
