"""Atropos environment: guess a number in several turns with the hints "more" and "less".

PYTHON profiles/environments/guessing_game.py serve --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1

PYTHON is an interpreter with atroposlib, which does not need Clotho. `serve --help` lists every setting.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

if TYPE_CHECKING:
    from profiles.environments import guessing, rollouts, scoring
else:
    import guessing
    import rollouts
    import scoring


class GuessingConfig(BaseEnvConfig):
    """Settings of the environment, in addition to those of `BaseEnvConfig`."""

    largest: int = Field(default=7, ge=1, description="The secret is an integer from 1 to this value.")
    turns: int = Field(default=3, ge=1, le=4, description="Maximum number of guesses per game.")
    turn_tokens: int = Field(default=24, ge=1, description="Maximum number of tokens per turn, including the thought.")


class GuessingEnv(BaseEnv):
    """Multiple turns. The `group_size` games of a group are independent and have the same secret."""

    name = "guessing_game"
    env_config_cls = GuessingConfig

    @classmethod
    def config_init(cls) -> tuple[GuessingConfig, list[APIServerConfig]]:
        """Return the default settings: Clotho's small policy, served on this machine."""
        config = GuessingConfig(**rollouts.SETTINGS, max_token_length=96, wandb_name=cls.name)
        return config, [APIServerConfig(**rollouts.SERVER)]

    async def setup(self) -> None:
        """Create the random number generator."""
        self._rng = random.Random()

    async def get_next_item(self) -> guessing.Story:
        """Return the next game."""
        return guessing.make_story(self._rng, self.config.largest)

    async def collect_trajectories(self, item: guessing.Story) -> tuple[dict[str, Any], list[Any]]:
        """Play all games of a group concurrently. If one game fails, the group is lost."""
        async with asyncio.TaskGroup() as games:
            played = [games.create_task(self._play(item)) for _ in range(self.config.group_size)]
        results = [game.result() for game in played]
        return rollouts.scored_group([node for node, _ in results], [score for _, score in results]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the trainer evaluates on held-out problems."""

    async def _play(self, story: guessing.Story) -> tuple[rollouts.Node, float]:
        messages = [{"role": "user", "content": story.question}]
        settings = rollouts.sampling(self.config.turn_tokens)
        settings["max_tokens"] = min(settings["max_tokens"], self.config.turn_tokens)
        reward = 0.0
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(self.config.turns):
                answer = await managed.chat_completion(messages=messages, n=1, **settings)
                (node,) = managed.get_state()["nodes"]
                text = answer.choices[0].message.content or ""
                reward, hint = guessing.score_guess(story, turn, scoring.integer_answer(text))
                if not hint:
                    break
                rollouts.close_turn(node, self.tokenizer.eos_token_id, self.tokenizer.eos_token)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
        return node, reward


if __name__ == "__main__":
    rollouts.quieten()
    GuessingEnv.cli()
