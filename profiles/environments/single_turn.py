"""Environments that ask one question and compute_advantages one answer: all but the judgement."""

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
    """Settings of such an environment, beside those of every environment of Atropos."""

    data_path: str = Field(default="", description="Local file of JSON lines with the questions.")
    question_key: str = Field(default="question", description="Column of the question.")
    answer_key: str = Field(default="answer", description="Column of the answer.")
    system: str = Field(default="", description="System message before every question; empty: none.")


class SingleTurnEnv(BaseEnv):
    """A question is asked `group_size` times in one request, and each completion is scored by itself."""

    env_config_cls = SingleTurnConfig

    @classmethod
    def config_init(cls) -> tuple[SingleTurnConfig, list[APIServerConfig]]:
        """Return what flags start from: the policy that ships with Clotho, served on this machine."""
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
        """Ask a question once for as many completions as a group has, and score them."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=rollouts.conversation(item.text, self.config.system),
                n=self.config.group_size,
                **rollouts.sampling(self.config.max_token_length),
            )
            nodes = managed.get_state()["nodes"]
        scores = [self.score(item, choice.message.content or "") for choice in answer.choices]
        return rollouts.scored_group(nodes, scores), []

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return the score of a completion; for subclasses to say."""
        raise NotImplementedError

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the trainer measures on held-out problems."""
