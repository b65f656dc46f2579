"""Advantages: what the reward of a completion says beside those of its group, or of its batch.

Departures from the papers: `epsilon` is added to every deviation, which bounds the advantages where rewards are almost
equal; by `deviation` it is the population's (divided by G) or the sample's (by G - 1), on which the papers are silent
and their codes differ. Rewards that are all equal, and a group of one, give exact zeros wherever a group is centred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clotho.config.objectives import (
    Advantage,
    BatchAdvantage,
    BatchCentredAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MeanAdvantage,
    NormalizedAdvantage,
)
from clotho.scoring.sequences import drawn_T
from protocols.rollout import ScoredGroup

Array = NDArray[np.float64]
Advantages = Callable[[list[Array], int, float], list[Array]]
"""advantages(rewards of each group (G,), delta degrees of freedom, epsilon) -> of each group (G,)."""


def group(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """Centre and scale by the group: A_i = (r_i - mean r) / (std r + epsilon).

    GRPO, DeepSeekMath (arXiv:2402.03300), section 4.1.2. |A_i| is below sqrt(G - 1) for the population's deviation.
    """
    return [_centred(reward_G) / (_spread(reward_G, ddof) + epsilon) for reward_G in rewards]


def mean(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """Centre by the group: A_i = r_i - mean r. Dr. GRPO (arXiv:2503.20783)."""
    return [_centred(reward_G) for reward_G in rewards]


def leave_one_out(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """Compare with the others of the group: A_i = r_i - mean of r_j, j not i. RLOO (arXiv:2402.14740).

    It is G / (G - 1) times the centred reward: the baseline owes nothing to r_i, so the gradient is unbiased.
    """
    return [_centred(reward_G) * (reward_G.size / max(reward_G.size - 1, 1)) for reward_G in rewards]


def batch(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """Whiten over the batch, groups or no groups: A = (r - mean) / (std + epsilon). REINFORCE++ (arXiv:2501.03262).

    The paper's form for one completion per prompt. A group of equal rewards still teaches that its prompt is easy, or
    hard; exact zeros only where the rewards of the whole batch are equal.
    """
    reward_M = np.concatenate(rewards)
    return _parts(_centred(reward_M) / (_spread(reward_M, ddof) + epsilon), rewards)


def batch_centred(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """Centre by the group, scale by the batch: A = d / (std of all d + epsilon), d = r - mean of its group.

    REINFORCE++ with baseline (arXiv:2501.03262). Groups that are almost equal are not blown up to the size of others.
    """
    centred = [_centred(reward_G) for reward_G in rewards]
    scale = _spread(np.concatenate(centred), ddof) + epsilon
    return [centred_G / scale for centred_G in centred]


ADVANTAGES: Mapping[type[Advantage], Advantages] = MappingProxyType(
    {
        GroupAdvantage: group,
        MeanAdvantage: mean,
        LeaveOneOutAdvantage: leave_one_out,
        BatchAdvantage: batch,
        BatchCentredAdvantage: batch_centred,
    }
)
"""Struct of the advantage -> advantages; `EnvironmentAdvantage` is `environment_advantages`."""


def advantages(settings: Advantage, rewards: Sequence[ArrayLike]) -> list[Array]:
    """Advantage of every completion of a batch, group by group: (G,) float64 each.

    rewards: per group, finite, any units. Raises ValueError if a group is empty or a reward is not finite.
    """
    reward = [np.asarray(reward_G, dtype=np.float64) for reward_G in rewards]
    for reward_G in reward:
        if reward_G.size == 0 or not np.isfinite(reward_G).all():
            raise ValueError(f"rewards of a group must be finite and at least one, not {reward_G.tolist()}")
    if not reward:
        return []
    ddof, epsilon = 0, 0.0
    if isinstance(settings, NormalizedAdvantage):
        ddof, epsilon = int(settings.deviation == "sample"), settings.epsilon
    return ADVANTAGES[type(settings)](reward, ddof, epsilon)


def environment_advantages(groups: Sequence[ScoredGroup]) -> list[list[Array]]:
    """Advantage of every token as the environment gave it: per group and completion, (T,) float64.

    Raises ValueError naming the group that brings none, or one that is not finite for a token that the policy drew.
    """
    return [_of_tokens(scored) for scored in groups]


def _of_tokens(scored: ScoredGroup) -> list[Array]:
    name = f"group {scored.group.prompt.group_id}"
    if len(scored.token_advantages) != len(scored.rewards):
        raise ValueError(
            f"{name} brings no token advantages, which learner.objective.advantage = 'environment' learns from"
        )
    rows = [np.asarray(row_T, dtype=np.float64) for row_T in scored.token_advantages]
    if not all(np.isfinite(row_T[drawn_T(c)]).all() for c, row_T in zip(scored.group.completions, rows, strict=True)):
        raise ValueError(f"{name} brings token advantages that are not finite")
    return rows


def _centred(value_M: Array) -> Array:
    """Less the mean; exact zeros where all are equal, which rounding of the mean would spoil."""
    if (value_M == value_M[0]).all():
        return np.zeros_like(value_M)
    return np.asarray(value_M - value_M.mean())


def _spread(value_M: Array, ddof: int) -> float:
    """Standard deviation; 0 for fewer values than it is defined for."""
    return float(value_M.std(ddof=ddof)) if value_M.size > ddof else 0.0


def _parts(value_M: Array, like: Sequence[Array]) -> list[Array]:
    return np.split(value_M, np.cumsum([part.size for part in like])[:-1])
