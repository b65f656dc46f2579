"""Atropos environment: the arithmetic problems that are part of Clotho.

PYTHON profiles/environments/arithmetic.py serve --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1

PYTHON is an interpreter with atroposlib, which does not need Clotho. `serve --help` lists every setting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

if TYPE_CHECKING:
    from profiles.environments import rollouts, scoring
    from profiles.environments.single_turn import SingleTurnConfig, SingleTurnEnv
else:
    import rollouts
    import scoring
    from single_turn import SingleTurnConfig, SingleTurnEnv

FORMAT_SCORE, CORRECT_SCORE = 0.2, 1.0


class ArithmeticConfig(SingleTurnConfig):
    """Settings of the environment."""

    data_path: str = Field(
        default=str(rollouts.EMBEDDED / "train.jsonl"), description="Local JSON Lines file with the problems."
    )
    question_key: str = Field(default="prompt", description="Column of the problem.")


class ArithmeticEnv(SingleTurnEnv):
    """Single turn. Scores the format `<think>...</think><answer>...</answer>` and the correct answer."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    max_token_length = 96

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return 0.2 for the format plus 1 for the correct number or option."""
        correct = scoring.is_correct(question.text, question.answer, completion)
        return FORMAT_SCORE * scoring.has_format(completion) + CORRECT_SCORE * correct


if __name__ == "__main__":
    rollouts.quieten()
    ArithmeticEnv.cli()
