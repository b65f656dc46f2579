"""Advantages: what a completion's reward says beside those of its own group.

Departure from DeepSeekMath (arXiv:2402.03300): `epsilon` is added to the deviation, which bounds the advantages of a
group whose rewards are almost equal; the deviation is the population's (divided by G, not G - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_relative(rewards_G: Sequence[float], *, epsilon: float) -> NDArray[np.float64]:
    """Centre the rewards of one group and scale them by the group's own spread.

    A_i = (r_i - mean r) / (std r + epsilon)   DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
    rewards_G: finite, any units. Returns (G,) float64 with mean zero; exact zeros if all rewards are equal, also for
    a group of one. Each |A_i| is below sqrt(G - 1), and below (max r - min r) / epsilon.
    Raises ValueError if the group is empty or a reward is not finite.
    """
    reward_G = np.asarray(rewards_G, dtype=np.float64)
    if reward_G.size == 0 or not np.isfinite(reward_G).all():
        raise ValueError(f"rewards of a group must be finite and at least one, not {list(rewards_G)}")
    if (reward_G == reward_G[0]).all():
        return np.zeros_like(reward_G)
    centred_G = reward_G - reward_G.mean()
    return np.asarray(centred_G / (reward_G.std() + epsilon))
