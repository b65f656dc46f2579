"""The reward of prime-rl's task reverse-text."""

from __future__ import annotations

from difflib import SequenceMatcher

from protocols.prompt import Problem


def similarity(problem: Problem, completion: str) -> float:
    """Return twice the number of matching characters, divided by the characters of both texts."""
    return SequenceMatcher(None, completion.strip(), problem.answer, autojunk=False).ratio()
