"""What Reasoning Gym adds to the library: problems that it generates, and their reward."""

from __future__ import annotations

from collections.abc import Mapping

from attachments.reasoning_gym.sections import GYM
from clotho.extension import Extension, Generator
from clotho.rewards.registry import BuiltIn


class ReasoningGym(Extension):
    """Generated problems, and the score of an answer."""

    def generators(self) -> Mapping[str, Generator]:
        """Return what generates the datasets of Reasoning Gym."""
        found = Generator(
            open="attachments.reasoning_gym.reasoning_gym:opened",
            weights="attachments.reasoning_gym.reasoning_gym:epoch_weights",
            rewards=({"name": "reasoning_gym", "correct": True},),
        )
        return {GYM: found}

    def rewards(self) -> Mapping[str, BuiltIn]:
        """Return the reward of its problems."""
        load = "attachments.reasoning_gym.reward:load"
        return {"reasoning_gym": BuiltIn(expects="the answer to the question {place}", load=load)}


EXTENSION = ReasoningGym()
