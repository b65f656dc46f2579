"""Reward `environment`: what the environment of an episode gave."""

from __future__ import annotations

from collections.abc import Sequence


def reward(completions: Sequence[object], environment_rewards: Sequence[float | None] = ()) -> Sequence[float | None]:
    """Return the reward that the environment of each completion gave; None where there was none."""
    return environment_rewards or [None] * len(completions)
