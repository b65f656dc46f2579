"""Atropos environment: school arithmetic, as in the problems that ship with Clotho.

PYTHON profiles/environments/arithmetic.py serve --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1

PYTHON is an interpreter with atroposlib; Clotho need not be installed there. `serve --help` lists every setting.
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

FORM, CORRECT = 0.2, 1.0
"""What the form of a completion is worth, and the right answer."""


class ArithmeticConfig(SingleTurnConfig):
    """Settings of the environment."""

    data_path: str = Field(
        default=str(rollouts.EMBEDDED / "train.jsonl"), description="Local file of JSON lines with the problems."
    )
    question_key: str = Field(default="prompt", description="Column of the problem.")


class ArithmeticEnv(SingleTurnEnv):
    """One turn; the form `<think>...</think><answer>...</answer>` and the right answer earn the score."""

    name = "arithmetic"
    env_config_cls = ArithmeticConfig
    max_token_length = 96

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return 0.2 for the form and 1 for the right number, or the letter of the right option."""
        right = scoring.is_correct(question.text, question.answer, completion)
        return FORM * scoring.well_formed(completion) + CORRECT * right


if __name__ == "__main__":
    rollouts.quieten()
    ArithmeticEnv.cli()
