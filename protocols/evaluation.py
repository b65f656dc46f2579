"""The held-out problems, and what the evaluator tells the monitor about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from msgspec import Struct

from protocols.prompt import Problem


class HeldOut(Struct, frozen=True, kw_only=True):
    """Questions -> evaluator. Problems with their rendered prompts, index by index, and what counts as a right answer.

    is_correct: (problem, completion's text) -> whether it is answered.
    """

    problems: Sequence[Problem]
    prompts: Sequence[tuple[int, ...]]
    is_correct: Callable[[Problem, str], Awaitable[bool]]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt; 0 where nothing is held out."""
        return max(map(len, self.prompts), default=0)


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
