"""What an objective sees of a micro-batch, and what it returns: the contract of every function in the table.

N counts the tokens of the micro-batch that the policy drew, padding included; B its completions. A function of your
own has the same form, `objective(logp_N, tokens, settings) -> PolicyLoss`, and is named `module:function` in
`learner.objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx


class Tokens(NamedTuple):
    """The sampled tokens of a micro-batch; every array is (N,), float32 unless said otherwise, without gradient.

    old_logp_N: log-probability under the policy that the ratio is against (`learner.objective.ratio_reference`), natural log.
    rollout_logp_N: under the sampler, as recorded when the token was sampled.
    advantage_N: of the token; the same for all tokens of a completion, unless the environment gave them token by token.
    weight_N: 1 for tokens that are learned from, 0 for others and for padding.
    sequence_N: int32, which of the `sequences` completions of this micro-batch the token belongs to (padding: 0).
    """

    old_logp_N: mx.array
    rollout_logp_N: mx.array
    advantage_N: mx.array
    weight_N: mx.array
    sequence_N: mx.array
    sequences: int

    def sum_B(self, value_N: mx.array) -> mx.array:
        """Sum of a value over the learned tokens of each completion: (B,)."""
        return mx.zeros((self.sequences,), dtype=value_N.dtype).at[self.sequence_N].add(self.weight_N * value_N)

    def mean_B(self, value_N: mx.array) -> mx.array:
        """Mean of a value over the learned tokens of each completion: (B,); 0 where it has none."""
        return self.sum_B(value_N) / mx.maximum(self.sum_B(mx.ones_like(self.weight_N)), 1.0)

    def spread_N(self, value_B: mx.array) -> mx.array:
        """Give every token the value of its completion: (N,)."""
        return value_B[self.sequence_N]


class PolicyLoss(NamedTuple):
    """Per token, (N,): the loss, to be minimised, before mask, correction and aggregation; and where it is cut.

    clipped_N: 1 or true where the token is outside the trust region: its gradient is cut off, or its weight cut down.
    It is counted only, and carries no gradient.
    """

    loss_N: mx.array
    clipped_N: mx.array


Objective = Callable[[mx.array, Tokens, Any], PolicyLoss]
"""objective(log pi with gradient (N,), tokens, settings) -> PolicyLoss."""
