"""Reward `exact`: the answer equals the reference answer as text."""

from __future__ import annotations

from clotho.rewards.answer import answer_text
from protocols.prompt import AnswerIn, Problem


def normalized(text: str) -> str:
    """Return the text in lower case, with single spaces between words."""
    return " ".join(text.casefold().split())


def reward(problem: Problem, completion: str, *, answer_in: AnswerIn = "tags") -> float:
    """Return 1.0 if answer and reference are equal up to case and white space, otherwise 0.0."""
    answer = answer_text(completion, answer_in)
    return float(answer is not None and normalized(answer) == normalized(problem.answer))
