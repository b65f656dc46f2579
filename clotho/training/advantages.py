"""Advantages of completions from the rewards of their group or of the whole batch.

Departures from the papers: `epsilon` is added to every standard deviation, which bounds the advantages if rewards are
almost equal. `deviation` selects the population's (division by G) or the sample's (by G - 1), which the papers do not
specify and their implementations do differently. For every advantage that is centered by the group, equal rewards and a
group of one give exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clotho.extension import TableDoor, provided
from clotho.scoring.sequences import sampled_mask_T
from clotho.settings.objectives import (
    Advantage,
    BatchAdvantage,
    BatchCentredAdvantage,
    BatchScaledAdvantage,
    BestWorstAdvantage,
    EnvironmentAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    MaxRLAdvantage,
    MeanAdvantage,
    NormalizedAdvantage,
)
from protocols.errors import ProfileError
from protocols.rollout import ScoredGroup

Array = NDArray[np.float64]
OfGroup = Callable[[Array, int, float], Array]
"""advantages(rewards of a group (G,), delta degrees of freedom, epsilon) -> advantages (G,)."""

OfBatch = Callable[[list[Array], int, float], list[Array]]
"""The same of all groups of a batch together."""


def group(reward_G: Array, ddof: int, epsilon: float) -> Array:
    """A_i = (r_i - mean r) / (std r + epsilon) over the group: GRPO, DeepSeekMath (arXiv:2402.03300), section 4.1.2.

    |A_i| is below sqrt(G - 1) for the population's standard deviation.
    """
    return centred(reward_G) / (spread(reward_G, ddof) + epsilon)


def mean(reward_G: Array, ddof: int, epsilon: float) -> Array:
    """A_i = r_i - mean r over the group: Dr. GRPO (arXiv:2503.20783)."""
    return centred(reward_G)


def leave_one_out(reward_G: Array, ddof: int, epsilon: float) -> Array:
    """A_i = r_i - mean of r_j over the other completions j of the group: RLOO (arXiv:2402.14740).

    It is G / (G - 1) times the centered reward. The baseline does not depend on r_i, so the gradient is unbiased.
    """
    return centred(reward_G) * (reward_G.size / max(reward_G.size - 1, 1))


def max_rl(reward_G: Array, ddof: int, epsilon: float) -> Array:
    """A_i = (r_i - mean r) / (mean r - z) over the group, with z = min(0, lowest r): MaxRL (arXiv:2602.02710).

    With rewards of 0 and 1, the policy gradient is an unbiased estimate for the first G terms of the series
    log p = -sum_k (1 - p)^k / k of the probability p of a correct completion: hard prompts weigh about 1 / p, where
    `mean` gives them weight 1. |A_i| is at most G - 1. If all rewards are 0, all advantages are 0. Rewards between 0
    and 1 are partial successes; a constant part of all rewards brings the weights of hard and easy prompts closer.
    Departure for negative rewards, which the paper excludes: they are measured from the lowest reward of the group, so
    that -1 and 1 give the same advantages as 0 and 1. prime-rl gives 0 to groups whose mean is not positive.
    """
    centred_G = centred(reward_G)
    return centred_G / (reward_G.mean() - min(0.0, reward_G.min())) if centred_G.any() else centred_G


def batch(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """A = (r - mean) / (std + epsilon) over the whole batch: REINFORCE++ (arXiv:2501.03262).

    The paper's form for one completion per prompt. A group of equal rewards has non-zero advantages if its prompt is
    easier or harder than the others; exact zeros only if all rewards of the batch are equal.
    """
    reward_M = np.concatenate(rewards)
    return _parts(centred(reward_M) / (spread(reward_M, ddof) + epsilon), rewards)


def batch_centred(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """A = d / (std of all d + epsilon) with d = r - mean of its group: REINFORCE++ with baseline (arXiv:2501.03262).

    Groups of almost equal rewards are not scaled up to the size of other groups.
    """
    differences = [centred(reward_G) for reward_G in rewards]
    scale = spread(np.concatenate(differences), ddof) + epsilon
    return [difference_G / scale for difference_G in differences]


def batch_scaled(rewards: list[Array], ddof: int, epsilon: float) -> list[Array]:
    """A_i = (r_i - mean r of its group) / (std r of the batch + epsilon): Lite PPO (arXiv:2508.08221).

    The deviation is that of the rewards themselves, so that it contains the differences between groups: it hardly
    changes if most groups have almost equal rewards, where `batch_centred` divides by the rest.
    """
    scale = spread(np.concatenate(rewards), ddof) + epsilon
    return [centred(reward_G) / scale for reward_G in rewards]


def best_worst(reward_G: Array, ddof: int, epsilon: float) -> Array:
    """A_i = 1 for the highest reward of the group, -1 for the lowest, else 0: a pair for objectives of preferences.

    Of equal rewards, the first completion counts. A group of equal rewards has no pair, and exact zeros.
    """
    place_G = np.arange(reward_G.size)
    signs_G = (place_G == reward_G.argmax()).astype(np.float64) - (place_G == reward_G.argmin())
    return np.asarray(signs_G)


OF_GROUP: Mapping[type[Advantage], OfGroup] = MappingProxyType(
    {
        GroupAdvantage: group,
        MeanAdvantage: mean,
        LeaveOneOutAdvantage: leave_one_out,
        MaxRLAdvantage: max_rl,
        BestWorstAdvantage: best_worst,
    }
)
OF_BATCH: Mapping[type[Advantage], OfBatch] = MappingProxyType(
    {BatchAdvantage: batch, BatchCentredAdvantage: batch_centred, BatchScaledAdvantage: batch_scaled}
)
"""Struct of the advantage -> advantages, for all that need nothing but rewards."""


ATTACHED: TableDoor[str] = TableDoor("library.ADVANTAGES", {"optimal_baseline": "vcpo"})
"""Advantages of attachments that need more than rewards, as `module:name`, by the types of their settings.

Each is called with an `UpdateStart`, minibatches with advantages of rewards alone, these advantages, and the scores of
the tokens under the parameters of the start. It returns `OfRewards`.
"""

OfRewards = Callable[[Sequence[int], list[Array]], list[Array]]
"""Advantages of groups with these indices from their rewards, (G,) each."""


def attached(settings: Advantage) -> Callable[..., OfRewards] | None:
    """Return the advantage of an attachment; None for those of this module. Raises ProfileError if it is absent."""
    if type(settings) in (*OF_GROUP, *OF_BATCH, EnvironmentAdvantage):
        return None
    name = str(settings.__struct_config__.tag)
    if (place := ATTACHED().get(name)) is None:
        raise ProfileError(f'learner.objective.advantage = "{name}" {ATTACHED.absence(name)}')
    found: Callable[..., OfRewards] = provided(place)
    return found


def advantages(settings: Advantage, rewards: Sequence[ArrayLike]) -> list[Array]:
    """Return the advantage of every completion: (G,) float64 per group; that of `group` for one of an attachment.

    rewards: per group, finite.
    Raises ValueError if a group is empty or a reward is not finite.
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
    if of_batch := OF_BATCH.get(type(settings)):
        return of_batch(reward, ddof, epsilon)
    return [OF_GROUP.get(type(settings), group)(reward_G, ddof, epsilon) for reward_G in reward]


def environment_advantages(scored: ScoredGroup) -> list[Array]:
    """Return the advantages per token that the environment gave: (T,) float64 per completion.

    Raises ValueError, naming the group, if there are none, or if one of a sampled token is not finite.
    """
    name = f"group {scored.group.prompt.group_id}"
    if len(scored.token_advantages) != len(scored.rewards):
        raise ValueError(f"{name} has no token advantages, and learner.objective.advantage = 'environment' needs them")
    rows = [np.asarray(row_T, dtype=np.float64) for row_T in scored.token_advantages]
    completions = scored.group.completions
    if not all(np.isfinite(row_T[sampled_mask_T(c)]).all() for c, row_T in zip(completions, rows, strict=True)):
        raise ValueError(f"{name} has token advantages that are not finite")
    return rows


def centred(value_M: Array) -> Array:
    """Subtract the mean; exact zeros for equal values, which the rounded mean would not give."""
    if (value_M == value_M[0]).all():
        return np.zeros_like(value_M)
    return np.asarray(value_M - value_M.mean())


def spread(value_M: Array, ddof: int) -> float:
    """Return the standard deviation; 0 if there are too few values."""
    return float(value_M.std(ddof=ddof)) if value_M.size > ddof else 0.0


def _parts(value_M: Array, like: Sequence[Array]) -> list[Array]:
    return np.split(value_M, np.cumsum([part.size for part in like])[:-1])
