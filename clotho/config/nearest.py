"""Suggestions for unknown names, by similarity."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

CUTOFF, LONGEST = 0.6, 100
"""Minimum similarity of a suggestion, and number of characters that are compared."""


def similarity(left: str, right: str) -> float:
    """Similarity of two names, from 0 to 1. Case, `-` and `_` are ignored."""
    plain_left, plain_right = (name[:LONGEST].lower().replace("-", "_") for name in (left, right))
    return SequenceMatcher(None, plain_left, plain_right).ratio()


def nearest(word: str, candidates: Iterable[str], *, cutoff: float = CUTOFF) -> str | None:
    """The candidate that is most similar to `word`, or None if none reaches `cutoff`."""
    scored = [(similarity(word, candidate), candidate) for candidate in candidates]
    best, candidate = max(scored, default=(-1.0, ""))
    return candidate if best >= cutoff else None


def did_you_mean(word: str, candidates: Iterable[str], *, cutoff: float = CUTOFF) -> str:
    """The end of an error message: `; did you mean X?`; empty if no candidate is similar."""
    guess = nearest(word, candidates, cutoff=cutoff)
    return "" if guess is None else f"; did you mean {guess}?"
