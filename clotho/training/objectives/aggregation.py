"""Loss aggregation: the weight of every token in the loss of the whole update.

The loss is the sum over trained tokens of loss weight times token loss. The weights are computed once for the whole
update, so that any split into micro-batches gives the same loss and the same gradient. Completions that are not trained
on (empty, or masked as truncated) have weight 0, and no denominator counts them, nor a group that has no other
completion. Completions that an importance correction rejects are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Lengths = Sequence[NDArray[np.float64]]
Coefficients = list[NDArray[np.float64]]


def token_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / T, T = trained tokens of the batch: DAPO (arXiv:2503.14476), section 3.3.

    Every token has equal weight, so long completions have more.
    """
    share = _share(sum(float(length_G.sum()) for length_G in lengths))
    return [_where_trained(length_G, share) for length_G in lengths]


def sequence_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (T_i * S), T_i = tokens of the completion, S = completions: GRPO (arXiv:2402.03300), equation 3.

    All completions have equal weight, also if groups differ in size.
    """
    share = _share(_sequences(lengths))
    return [_where_trained(length_G, share / np.maximum(length_G, 1.0)) for length_G in lengths]


def token_sum(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (max_tokens * S), S = completions: the constant of Dr. GRPO (arXiv:2503.20783).

    Every token has the same weight in every batch.
    """
    share = _share(max_tokens * _sequences(lengths))
    return [_where_trained(length_G, share) for length_G in lengths]


def group_mean(lengths: Lengths, max_tokens: int) -> Coefficients:
    """Return 1 / (T_g * P), T_g = tokens of the group, P = groups: the prompt average of ScaleRL (arXiv:2510.13786).

    All groups have equal weight, and all tokens of a group have equal weight.
    """
    share = _share(sum(bool(length_G.any()) for length_G in lengths))
    return [_where_trained(length_G, share * _share(float(length_G.sum()))) for length_G in lengths]


AGGREGATIONS: Mapping[str, Callable[[Lengths, int], Coefficients]] = MappingProxyType(
    {"token_mean": token_mean, "sequence_mean": sequence_mean, "token_sum": token_sum, "group_mean": group_mean}
)
"""`learner.objective.loss_aggregation` -> aggregation(lengths, max_tokens)."""


def loss_weights(kind: str, lengths: Sequence[Sequence[int]], *, max_tokens: int) -> Coefficients:
    """Return the loss weight of a token of each completion: (G,) float64 per group.

    kind: key of `AGGREGATIONS`. lengths: number of trained tokens of every completion of every group. max_tokens:
    largest possible length of a completion. All weights are 0 if there is no trained token.
    """
    return AGGREGATIONS[kind]([np.asarray(lengths_G, dtype=np.float64) for lengths_G in lengths], max_tokens)


def _sequences(lengths: Lengths) -> int:
    return sum(int(np.count_nonzero(length_G)) for length_G in lengths)


def _share(parts: float) -> float:
    return 1.0 / parts if parts else 0.0


def _where_trained(length_G: NDArray[np.float64], share: float | NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(length_G > 0, share, 0.0)
