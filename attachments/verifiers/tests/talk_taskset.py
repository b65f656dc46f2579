"""A taskset of the tests: conversations, and environments that fail. What a task does depends on its column `does`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import verifiers.v1 as vf

DOES = ("talks", "raises", "hangs", "blocks", "exits", "nan", "floods", "changes", "two")


class TalkData(vf.TaskData):
    """One task."""

    does: str


class TalkTask(vf.Task[TalkData]):
    """A task, which the environment scores."""


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    """One task of each kind."""

    def load(self) -> Iterator[TalkTask]:
        """Yield the tasks."""
        for does in DOES:
            yield TalkTask(TalkData(prompt="go", system_prompt="be short", does=does), self.config.task)


class TalkEnvConfig(vf.EnvConfig):
    """Two agents, of which the second plays in the task `two` only."""

    player: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkEnvConfig]):
    """Says twice what it was told, and rewards the number of turns."""

    async def setup(self, agents: vf.Agents) -> None:
        """The second agent is not trained."""
        agents.other.trainable = False

    async def run(self, task: TalkTask, agents: vf.Agents) -> None:
        """Talk, or misbehave."""
        does = task.data.does
        if does == "two":
            await agents.other.run(task)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            turns = 0
            while not segment.terminated:
                turns += 1
                if turns > 2:
                    break
                await misbehave(does)
                segment = await interaction.turn(f"{does} {turns}: {segment.last_reply}")
        interaction.trace.record_reward("turns", float("nan") if does == "nan" else float(interaction.trace.num_turns))


async def misbehave(does: str) -> None:
    """Do what a task should not."""
    match does:
        case "raises":
            raise RuntimeError("no")
        case "hangs":
            await asyncio.sleep(600)
        case "blocks":
            time.sleep(600)  # noqa: ASYNC251  (that is what it should not do)
        case "exits":
            os._exit(3)
        case "floods":
            print("x" * 200_000)  # noqa: T201


__all__ = ["TalkEnv", "TalkTaskset"]
