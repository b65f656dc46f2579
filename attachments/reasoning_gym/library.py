"""What Reasoning Gym adds to the library: the reward of its problems."""

from __future__ import annotations

from collections.abc import Mapping

from clotho.extension import Extension
from clotho.rewards.registry import BuiltIn


class ReasoningGym(Extension):
    """The score of an answer."""

    def rewards(self) -> Mapping[str, BuiltIn]:
        """Return the reward of its problems."""
        load = "attachments.reasoning_gym.reward:load"
        return {"reasoning_gym": BuiltIn(expects="the answer to the question {place}", load=load)}


EXTENSION = ReasoningGym()
