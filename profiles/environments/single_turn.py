"""Base class of environments with one question and one answer. Subclasses define the score."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig
from pydantic import Field

if TYPE_CHECKING:
    from profiles.environments import rollouts
else:
    import rollouts


class SingleTurnConfig(BaseEnvConfig):
    """Settings of a single-turn environment, in addition to those of `BaseEnvConfig`."""

    data_path: str = Field(default="", description="Local JSON Lines file with the questions.")
    question_key: str = Field(default="question", description="Column of the question.")
    answer_key: str = Field(default="answer", description="Column of the answer.")
    system: str = Field(default="", description="System message before every question; empty for none.")


class SingleTurnEnv(BaseEnv):
    """Samples `group_size` completions of a question in one request and scores each of them."""

    env_config_cls = SingleTurnConfig

    @classmethod
    def config_init(cls) -> tuple[SingleTurnConfig, list[APIServerConfig]]:
        """Return the default settings: Clotho's small policy, served on this machine."""
        config = cls.env_config_cls(**rollouts.SETTINGS, max_token_length=cls.max_token_length, wandb_name=cls.name)
        return config, [APIServerConfig(**rollouts.SERVER)]

    async def setup(self) -> None:
        """Read the questions."""
        config = self.config
        questions = rollouts.read_questions(
            config.data_path, question_key=config.question_key, answer_key=config.answer_key
        )
        self._questions = rollouts.endless(questions, random.Random())

    async def get_next_item(self) -> rollouts.Question:
        """Return the next question."""
        return next(self._questions)

    async def collect_trajectories(self, item: rollouts.Question) -> tuple[dict[str, Any], list[Any]]:
        """Sample and score the completions of a group."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            response = await managed.chat_completion(
                messages=rollouts.conversation(item.text, self.config.system),
                n=self.config.group_size,
                **rollouts.sampling(self.config.max_token_length),
            )
            nodes = managed.get_state()["nodes"]
        scores = [self.score(item, choice.message.content or "") for choice in response.choices]
        return rollouts.scored_group(nodes, scores), []

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return the score of a completion."""
        raise NotImplementedError

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the trainer evaluates on held-out problems."""
