"""The reward for sharing words with the reference answer."""

from __future__ import annotations

import re

from clotho.rewards.answer import answer_text
from protocols.prompt import Problem

WORD = re.compile(r"(?:(?<!\w)-(?=\d))?\w+(?:[.,'\u2019-]\w+)*")
"""A word or number: marks inside it are its own (`don't`, `3.5`), marks around it are not, a minus sign is."""


def words(text: str) -> frozenset[str]:
    """Return the distinct words of a text, in lower case and without punctuation around them."""
    return frozenset(WORD.findall(text.casefold()))


def reward(problem: Problem, completion: str) -> float:
    """Return |A ∩ B| / |A ∪ B| for the word sets of answer and reference (Jaccard, 1912): in [0, 1].

    Two empty sets are equal: 1.0. A completion without an answer has 0.0.
    """
    answer = answer_text(completion)
    if answer is None:
        return 0.0
    given, wanted = words(answer), words(problem.answer)
    return len(given & wanted) / len(given | wanted) if given or wanted else 1.0
