"""Atropos environment: questions with a short answer from a local file, such as GSM8K, for any chat model.

PYTHON profiles/environments/question_answer.py serve --env.data_path train.jsonl --env.tokenizer_name MODEL
    --env.rollout_server_url URL --openai.base_url http://HOST:PORT/v1 --openai.tokenizer_name MODEL

PYTHON is an interpreter with atroposlib; Clotho need not be installed there. Nothing is downloaded but, where MODEL is
no directory, its tokenizer. `serve --help` lists every setting.
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
        default="answer", description="Column of the answer; of a worked solution, what follows the last ####."
    )
    system: str = Field(default=INSTRUCTION, description="System message before every question; empty: none.")
    form_score: float = Field(default=0.0, description="What the form <think>...</think><answer>...</answer> earns.")
    tags_needed: bool = Field(
        default=True, description="Take an answer only from <answer>; else the last number of an untagged text, too."
    )


class QuestionAnswerEnv(SingleTurnEnv):
    """One turn; the right answer earns 1."""

    name = "question_answer"
    env_config_cls = QuestionAnswerConfig
    max_token_length = 512

    def score(self, question: rollouts.Question, completion: str) -> float:
        """Return 1 for the right answer, and what the form is worth."""
        reference = scoring.marked_reference(question.answer)
        right = scoring.is_correct(question.text, reference, completion)
        if not right and not self.config.tags_needed and scoring.ANSWER not in completion:
            right = scoring.ends_with(completion, reference)
        return float(right) + float(self.config.form_score) * scoring.well_formed(completion)


if __name__ == "__main__":
    rollouts.quieten()
    QuestionAnswerEnv.cli()
