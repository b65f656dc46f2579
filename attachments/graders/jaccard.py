"""Reward `jaccard`: overlap between the words of the answer and the words of a reference answer in free text."""

from __future__ import annotations

import re

from attachments.graders.choice_correctness import reference_letters
from attachments.graders.math_eval import parse_quantity
from clotho.rewards.answer import answer_text
from protocols.prompt import AnswerIn, Problem

WORD = re.compile(r"(?:(?<!\w)-(?=\d))?\w+(?:[.,'\u2019-]\w+)*")
"""A word or number, including inner marks (`don't`, `3.5`) and a leading minus sign, without surrounding marks."""


def words(text: str) -> frozenset[str]:
    """Return the distinct words of a text, in lower case and without surrounding punctuation."""
    return frozenset(WORD.findall(text.casefold()))


def reward(problem: Problem, completion: str, *, answer_in: AnswerIn = "tags") -> float | None:
    """Return the Jaccard index |A ∩ B| / |A ∪ B| of the word sets A of the answer and B of the reference, in [0, 1].

    Two empty sets have index 1.0. A completion without an answer has reward 0.0. The result is None if the reference is
    a number or the letters of options: `math_eval` and `choice_correctness` apply there. Source: Jaccard, 1912.
    """
    if parse_quantity(problem.answer) is not None or reference_letters(problem):
        return None
    answer = answer_text(completion, answer_in)
    if answer is None:
        return 0.0
    answer_words, reference_words = words(answer), words(problem.answer)
    union = answer_words | reference_words
    return len(answer_words & reference_words) / len(union) if union else 1.0
