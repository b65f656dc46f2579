"""Atropos environment: questions with short answers from a local file, such as GSM8K, for any chat model.

PYTHON profiles/environments/question_answer.py serve --env.data_path train.jsonl --env.tokenizer_name MODEL
    --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1 --openai.tokenizer_name MODEL

PYTHON is an interpreter with atroposlib, which does not need Clotho. The script downloads only the tokenizer, and only
if MODEL is not a directory. `serve --help` lists every setting.
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

INSTRUCTION = "Think inside <think></think>, then give the final answer alone inside <answer></answer>."


class QuestionAnswerConfig(SingleTurnConfig):
    """Settings of the environment."""

    answer_key: str = Field(
        default="answer", description="Column of the answer. In a worked solution, the answer follows the last ####."
    )
    system: str = Field(default=INSTRUCTION, description="System message before every question; empty for none.")
    form_score: float = Field(default=0.0, description="Score of the format <think>...</think><answer>...</answer>.")
    tags_needed: bool = Field(
        default=True,
        description="Accept answers only inside <answer>; otherwise also the last number of a text without tags.",
    )


class QuestionAnswerEnv(SingleTurnEnv):
    """Single turn. The correct answer scores 1."""

    name = "question_answer"
    env_config_cls = QuestionAnswerConfig
    max_token_length = 512

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return 1 for the correct answer plus `form_score` for the format."""
        reference = scoring.marked_reference(question.answer)
        correct = scoring.is_correct(question.text, reference, completion)
        if not correct and not self.config.tags_needed and scoring.ANSWER not in completion:
            correct = scoring.ends_with(completion, reference)
        return float(correct) + float(self.config.form_score) * scoring.has_format(completion)


if __name__ == "__main__":
    rollouts.quieten()
    QuestionAnswerEnv.cli()
