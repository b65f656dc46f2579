"""Held-out problems, and the evaluation report from the evaluator to the monitor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from protocols.prompt import Problem


class HeldOut(Struct, frozen=True, kw_only=True):
    """Held-out problems with their rendered prompts, index by index.

    is_correct: (problem, completion text) -> whether the completion is correct; None if no reward with
    `correct = true` applies to the problem.
    """

    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]
    is_correct: Callable[[Problem, str], Awaitable[bool | None]]

    @property
    def longest_prompt(self) -> int:
        """Length of the longest prompt in tokens; 0 if there are no held-out problems."""
        return max(map(len, self.prompts), default=0)


class EvalReport(Struct, frozen=True, kw_only=True, tag=True):
    """Evaluator -> monitor. Greedy accuracy of one policy version on held-out problems.

    problems: number of problems that a reward with `correct = true` applies to. ungraded: number of problems that no
    such reward applies to; they do not count towards the accuracy. accuracy: share of correct answers among `problems`;
    0 if there are none. interval: interval of 95 % of the accuracy. by_type: accuracy for each type of problem. final:
    evaluated after the last update.
    """

    step: int
    version: int
    problems: int
    ungraded: int = 0
    accuracy: float
    interval: tuple[float, float]
    by_type: dict[str, float]
    completion_tokens: int
    seconds: float
    final: bool
