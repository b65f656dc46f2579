"""Reward functions that ignore the completion."""

from __future__ import annotations

from protocols.prompt import Problem


def zero(problem: Problem, completion: str) -> float:
    """Return 0."""
    return 0.0


def one(problem: Problem, completion: str) -> float:
    """Return 1."""
    return 1.0
