"""The guessing game as a taskset of verifiers: the environment of the module `guessing` plays the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from guessing import NAMES, THINGS, Guessing, Story


class GuessingData(vf.TaskData):
    """One game."""

    story: dict[str, Any]


class GuessingTask(vf.Task[GuessingData]):
    """A game, which the environment scores."""


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    """All games: every name, every thing and every number from 1 to 7."""

    def load(self) -> Iterator[GuessingTask]:
        """Yield the games."""
        for name in NAMES:
            for things in THINGS:
                for secret in range(1, 8):
                    story = {"name": name, "things": things, "secret": secret}
                    prompt = Story(**story, largest=7).question
                    yield GuessingTask(GuessingData(prompt=prompt, story=story), self.config.task)


class GuessingEnvConfig(vf.EnvConfig):
    """The policy plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    """Leads a game: the hints are the messages of the user."""

    async def run(self, task: GuessingTask, agents: vf.Agents) -> None:
        """Play until the number is found, or the turns are over."""
        game = Guessing()
        game.reset(**task.data.story)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and (hint := game.step(segment.last_reply)) is not None:
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("game", game.reward)


__all__ = ["GuessingEnv", "GuessingTaskset"]
