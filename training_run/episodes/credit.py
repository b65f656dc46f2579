"""Credit per turn: advantages of the turns of a group of episodes, from the rewards that environments give to turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from statistics import fmean, pstdev

EPSILON = 1e-4
"""Added to the standard deviation."""


def turn_advantages(rewards: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """A_ik = sum over l >= k of (r_il - mean r) / (std r + epsilon): DeepSeekMath (arXiv:2402.03300), section 4.1.3.

    r_il: reward of turn l of episode i; its advantage counts the turns after it. Mean and standard deviation are those
    of all turns of all episodes of the group. The paper has steps of one completion in the place of turns. Equal
    rewards give exact zeros. rewards: empty for an episode whose credit is that of the whole episode, or without turns.
    """
    every = list(chain.from_iterable(rewards))
    if len(set(every)) < 2:
        return [(0.0,) * len(row) for row in rewards]
    mean, scale = fmean(every), pstdev(every) + EPSILON
    return [tuple(accumulate((one - mean) / scale for one in reversed(row)))[::-1] for row in rewards]
