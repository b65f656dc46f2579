"""Atropos environment: a number is guessed in several turns, each answered with "more" or "less".

PYTHON profiles/environments/guessing_game.py serve --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1

PYTHON is an interpreter with atroposlib; Clotho need not be installed there. `serve --help` lists every setting.
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
    """Settings of the environment, beside those of every environment of Atropos."""

    largest: int = Field(default=7, ge=1, description="The secret is a whole number from 1 to this.")
    turns: int = Field(default=3, ge=1, le=4, description="Guesses for one secret.")
    turn_tokens: int = Field(default=24, ge=1, description="Tokens of one guess at most, thought included.")


class GuessingEnv(BaseEnv):
    """Several turns; the `group_size` games of a group are played apart from each other for the same secret."""

    name = "guessing_game"
    env_config_cls = GuessingConfig

    @classmethod
    def config_init(cls) -> tuple[GuessingConfig, list[APIServerConfig]]:
        """Return what flags start from: the policy that ships with Clotho, served on this machine."""
        config = GuessingConfig(**rollouts.SETTINGS, max_token_length=96, wandb_name=cls.name)
        return config, [APIServerConfig(**rollouts.SERVER)]

    async def setup(self) -> None:
        """Make the source of secrets."""
        self._rng = random.Random()

    async def get_next_item(self) -> guessing.Story:
        """Think of the next number."""
        return guessing.tell(self._rng, self.config.largest)

    async def collect_trajectories(self, item: guessing.Story) -> tuple[dict[str, Any], list[Any]]:
        """Play all games of a group at the same time; one that fails ends the others, and the group is lost."""
        async with asyncio.TaskGroup() as games:
            played = [games.create_task(self._play(item)) for _ in range(self.config.group_size)]
        results = [game.result() for game in played]
        return rollouts.scored_group([node for node, _ in results], [score for _, score in results]), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the trainer measures on held-out problems."""

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
                reward, hint = guessing.compute_advantages(story, turn, scoring.whole_number(text))
                if not hint:
                    break
                rollouts.close_turn(node, self.tokenizer.eos_token_id, self.tokenizer.eos_token)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
        return node, reward


if __name__ == "__main__":
    rollouts.quieten()
    GuessingEnv.cli()
