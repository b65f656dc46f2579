"""Reward `reasoning_gym`: the score of a dataset of Reasoning Gym for an answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from attachments.reasoning_gym.gym_library import Entry, GymError, create, library, score
from clotho.rewards.answer import answer_text
from clotho.rewards.registry import RewardFunction, RewardOptions
from protocols.errors import ProfileError
from protocols.prompt import Problem

ORIGIN = "reasoning_gym"
"""Column of a problem with its dataset, level and settings."""


def load(options: RewardOptions) -> RewardFunction:
    """Return the reward function. Raises ProfileError if the library is not installed."""
    try:
        library()
    except GymError as error:
        raise ProfileError(f"rewards.name 'reasoning_gym': {error}") from error

    def reward(problem: Problem, completion: str) -> float | None:
        """Return the score, from 0 to 1; None for a problem that is not of Reasoning Gym.

        A correct answer scores 1; some datasets give partial credit to others. A completion without an answer has
        reward 0.0. An exception of the library is an exception of the reward.
        """
        origin = problem.extra.get(ORIGIN)
        if not isinstance(origin, dict):
            return None
        answer = answer_text(completion, options.answer_in)
        if answer is None:
            return 0.0
        dataset = _dataset(origin["dataset"], msgspec.json.encode(origin["settings"]), origin["level"])
        return score(dataset, msgspec.convert({**problem.extra, "literal": origin["literal"]}, Entry), answer)

    return reward


@lru_cache(maxsize=64)
def _dataset(name: str, settings: bytes, level: int | None) -> Any:
    return create(name, msgspec.json.decode(settings), level)
