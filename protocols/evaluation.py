"""Evaluator -> monitor: how the policy does on held-out problems."""

from __future__ import annotations

from msgspec import Struct


class EvalReport(Struct, frozen=True, kw_only=True, tag=True):
    """Evaluator -> monitor. Greedy accuracy of one pinned version of the weights on held-out problems.

    accuracy: share of problems answered correctly; by_type: the same per kind of problem.
    final: measured after the last update.
    """

    step: int
    version: int
    problems: int
    accuracy: float
    by_type: dict[str, float]
    completion_tokens: int
    seconds: float
    final: bool
