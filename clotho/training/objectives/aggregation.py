"""How the losses of tokens become one: the coefficient of every token in the loss of the whole update.

The loss is the sum over learned tokens of coefficient times token loss, and the coefficients are worked out once for
the whole update: any split into micro-batches gives the same loss and the same gradient. The same rule holds
everywhere for completions that nothing is learned from (empty, or masked as truncated): their coefficient is 0 and no
denominator counts them, nor a group of nothing but such completions. Completions that a correction rejects count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[NDArray[np.float64]]
Coefficients = list[NDArray[np.float64]]


def token_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """1 / T, T the learned tokens of the batch: DAPO (arXiv:2503.14476), section 3.3. Long completions weigh more."""
    share = _share(sum(float(length_G.sum()) for length_G in lengths))
    return [_where_learnt(length_G, share) for length_G in lengths]


def sequence_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """1 / (T_i S), T_i the completion's tokens, S the completions: GRPO (arXiv:2402.03300), equation 3.

    All completions weigh the same, also where groups differ in size.
    """
    share = _share(_sequences(lengths))
    return [_where_learnt(length_G, share / np.maximum(length_G, 1.0)) for length_G in lengths]


def token_sum(lengths: Lengths, max_tokens: int) -> Coefficients:
    """1 / (max_tokens S): the constant of Dr. GRPO's code (arXiv:2503.20783). All tokens weigh the same, always."""
    share = _share(max_tokens * _sequences(lengths))
    return [_where_learnt(length_G, share) for length_G in lengths]


def group_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """1 / (T_g P), T_g the tokens of the group, P the groups: all groups weigh the same, and all tokens of a group.

    The prompt average of ScaleRL (arXiv:2510.13786).
    """
    share = _share(sum(bool(length_G.any()) for length_G in lengths))
    return [_where_learnt(length_G, share * _share(float(length_G.sum()))) for length_G in lengths]


AGGREGATIONS: Mapping[str, Callable[[Lengths, int], Coefficients]] = MappingProxyType(
    {"token_mean": token_mean, "sequence_mean": sequence_mean, "token_sum": token_sum, "group_mean": group_mean}
)
"""`learner.objective.loss_aggregation` -> aggregation(lengths, max_tokens)."""


def coefficients(kind: str, lengths: Sequence[Sequence[int]], *, max_tokens: int) -> Coefficients:
    """Coefficient of each learned token, per group and completion: (G,) float64 each.

    lengths: learned tokens of every completion of every group, which the policy drew. max_tokens: the most that a
    completion can have. Where nothing is learned at all, all are 0.
    """
    return AGGREGATIONS[kind]([np.asarray(lengths_G, dtype=np.float64) for lengths_G in lengths], max_tokens)


def _sequences(lengths: Lengths) -> int:
    return sum(int(np.count_nonzero(length_G)) for length_G in lengths)


def _share(parts: float) -> float:
    return 1.0 / parts if parts else 0.0


def _where_learnt(length_G: NDArray[np.float64], share: float | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(length_G > 0, share, 0.0)
