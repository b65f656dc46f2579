"""Whether the problem of a group was solved by all of its completions, by none, or by some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from protocols.rollout import GroupOutcome, bounded
from training_run.rewards.overlong import OVERLONG

Solved = Literal["all", "none", "mixed"]


def has_rewards(group: GroupOutcome) -> bool:
    """Whether something rewarded the completions of a group: reward functions, or its environment, which names none."""
    return bool(group.rewards) and bool(group.parts or not group.correct)


def solved_by(group: GroupOutcome) -> Solved | None:
    """Which completions of a group solved its problem; None for a group without rewards.

    A completion solves it if the rewards with `correct = true` accept it. Where none applies, the known values decide:
    it does if each reward function (without them, the sum) returns at least 1, and does not if each returns at most 0.
    A group with other values is `mixed`.
    """
    if not has_rewards(group) or not bounded(group.rewards):
        return None
    rows = [row for name, row in group.parts.items() if name != OVERLONG] or [group.rewards]
    judged = group.correct or (None,) * len(group.rewards)
    found = {
        _solves([value for row in rows if (value := row[i]) is not None]) if correct is None else correct
        for i, correct in enumerate(judged)
    }
    return "all" if found == {True} else "none" if found == {False} else "mixed"


def _solves(values: list[float]) -> bool | None:
    return None if not values else True if min(values) >= 1 else False if max(values) <= 0 else None


def count_solved(groups: Iterable[GroupOutcome]) -> Counter[Solved]:
    """Return the number of groups by which of their completions solved the problem."""
    return Counter(solved for group in groups if (solved := solved_by(group)) is not None)
