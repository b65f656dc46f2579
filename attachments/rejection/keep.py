"""Which completions are kept: conditions on their rewards, and the best ones of each problem."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from protocols.errors import ProfileError, visible
from training_run.evaluation.accuracy import Judged, Outcome

OPERATORS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {
        ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
        "<": operator.lt,
    }
)  # fmt: skip
CONDITION = re.compile(r"\s*([\w:./-]+)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*")

REWARD, CORRECT, LENGTH = "reward", "correct", "length"
"""Names in a condition beside those of reward functions: the weighted sum, 1 or 0, and tokens of the completion."""


class Condition(NamedTuple):
    """A comparison of a value of a completion with a number."""

    name: str
    operator: str
    number: float

    def holds(self, one: Judged) -> bool:
        """Whether a completion fulfils the condition; one without the value does not."""
        value = values_of(one).get(self.name)
        return value is not None and OPERATORS[self.operator](value, self.number)


def values_of(one: Judged) -> dict[str, float | None]:
    """Return the values of a completion that conditions can name."""
    return {
        **one.grade.parts,
        REWARD: one.grade.reward,
        CORRECT: None if one.grade.correct is None else float(one.grade.correct),
        LENGTH: float(one.completion.length),
    }


def conditions(text: str) -> tuple[Condition, ...]:
    """Read conditions such as `reward >= 1 and length < 200`, all of which must hold. Raises ProfileError."""
    found = []
    for part in re.split(r"\band\b", text):
        match = CONDITION.fullmatch(part)
        if match is None:
            raise ProfileError(
                f"--keep {visible(text, 100)!r} is not a condition: write one such as 'reward >= 1', or several with "
                "'and' between them"
            )
        found.append(Condition(match[1], match[2], float(match[3])))
    return tuple(found)


def kept(outcome: Outcome, wanted: Sequence[Condition], *, limit: int) -> list[Judged]:
    """Return the best completions of a problem that fulfil all conditions, by their rewards, each text once.

    Of equal rewards, the shorter completion is first. Truncated completions are never kept: the policy would learn not
    to end. limit: largest number; 0: all.
    """
    found = [one for one in (outcome.greedy, *outcome.samples) if one.completion.finish_reason == "stop"]
    found = [one for one in found if all(condition.holds(one) for condition in wanted)]
    found.sort(key=lambda one: (-(one.grade.reward or 0.0), one.completion.length))
    first: dict[str, Judged] = {}
    for one in found:
        first.setdefault(one.completion.text, one)
    return list(first.values())[: limit or None]
