"""The forecast of a run's end, from its metrics and evaluations.

Decoding and updates take turns in some runs, and overlap in others. The time of a step is taken to be in proportion to
the sum of both costs:

    seconds per step = mean seconds per step * (a * sampled tokens + b * trained tokens) / mean of the same sum

a is the mean decode time per sampled token, b the mean time of an update per trained token. Both are measured. The
numbers of tokens change while the policy learns: completions become longer, and more groups have no variance. Each is
extrapolated by exponential smoothing with a damped trend (Gardner and McKenzie, 1985), which follows a change and does
not continue it for ever. Evaluations to come are added, at the speed of the first one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from protocols.evaluation import EvalReport

LEVEL, TREND, DAMPING = 0.5, 0.3, 0.8
"""Parameters of the smoothing: weight of a new value, weight of a new trend, and damping of the trend per step."""

WINDOW = 64
"""Number of the latest steps that the forecast uses."""


class StepTime(Struct, frozen=True):
    """The measurements of one step. end: age of the run in seconds. sampled, trained: tokens. groups: trained groups.

    decode, update: seconds of decoding and of the update; where they take turns, the latter includes the former.
    """

    end: float
    decode: float
    update: float
    sampled: float
    trained: float
    groups: float


class EvaluationTime(Struct, frozen=True, kw_only=True):
    """One evaluation. problems: number of held-out problems. seconds: duration."""

    problems: int
    seconds: float


class RemainingWork(Struct, frozen=True, kw_only=True):
    """What a run still does. steps: of the whole run. evaluates: whether it evaluates at all.

    interval: steps between evaluations; 0 for none. between: problems of these evaluations; 0 for all.
    """

    steps: int
    evaluates: bool
    interval: int = 0
    between: int = 0


STEP_METRICS = {
    "end": "time/run",
    "decode": "time/decode",
    "update": "time/update",
    "sampled": "completion_length/total",
    "trained": "trained_tokens",
    "groups": "groups/trained",
}
"""Fields of `StepTime`, in their order, with their keys in metrics.jsonl."""


def step_time(metrics: Mapping[str, Any]) -> StepTime:
    """Return the measurements of one line of metrics.jsonl; null counts as 0. Raises KeyError if a key is missing."""
    return StepTime(**{field: metrics[key] or 0 for field, key in STEP_METRICS.items()})


def seconds_left(
    plan: RemainingWork,
    done: int,
    steps: Sequence[StepTime],
    first_evaluation: EvaluationTime | None,
    *,
    began: float = 0.0,
) -> float | None:
    """Return the estimated time from the end of the last step to the end of the run; None before the first step.

    done: number of steps of the run that are done. steps: the latest of these, in order. first_evaluation: of the
    policy before its first update. began: age of the run when `steps` began.
    """
    if not steps:
        return None
    remaining = max(0, plan.steps - done)
    return remaining * _per_step(steps, remaining, first_evaluation, began) + _evaluations(plan, done, first_evaluation)


def _per_step(
    steps: Sequence[StepTime], remaining: int, first_evaluation: EvaluationTime | None, began: float
) -> float:
    """Return the expected mean duration of the remaining steps. The first step of a process takes longer."""
    if len(steps) == 1:
        return max(0.0, steps[0].end - began - (first_evaluation.seconds if first_evaluation else 0.0))
    later = steps[1:]
    duration = (later[-1].end - steps[0].end) / len(later)
    decoding, learning = sum(step.decode for step in later), sum(step.update for step in later)
    trained, sampled = sum(step.trained for step in later), sum(step.sampled for step in later)
    expected = decoding + learning
    if sampled:
        expected += decoding * (len(later) * _expected([step.sampled for step in steps], remaining) / sampled - 1)
    if trained:
        recent = later[-5:]
        tokens_per_group = sum(step.trained for step in recent) / max(1, sum(step.groups for step in recent))
        tokens = len(later) * tokens_per_group * _expected([step.groups for step in steps], remaining)
        expected += learning * (tokens / trained - 1)
    return duration * expected / (decoding + learning) if decoding + learning else duration


def _expected(values: Sequence[float], ahead: int) -> float:
    """Return the mean of the next `ahead` values by smoothing with a damped trend; never negative."""
    level, trend = float(values[0]), 0.0
    for value in values[1:]:
        before = level
        level = LEVEL * value + (1 - LEVEL) * (before + DAMPING * trend)
        trend = TREND * (level - before) + (1 - TREND) * DAMPING * trend
    total, reach = 0.0, 0.0
    for step in range(1, min(ahead, WINDOW) + 1):
        reach += DAMPING**step
        total += max(0.0, level + trend * reach)
    total += max(0, ahead - WINDOW) * max(0.0, level + trend * reach)  # the trend has ended
    return total / ahead if ahead else 0.0


def _evaluations(plan: RemainingWork, done: int, first: EvaluationTime | None) -> float:
    """Return the time of the evaluations to come."""
    if not plan.evaluates or first is None or not first.problems:
        return 0.0
    between = min(plan.between or first.problems, first.problems)
    due = max(0, (plan.steps - 1) // plan.interval - done // plan.interval) if plan.interval else 0
    return first.seconds / first.problems * (due * between + first.problems)


class RunForecast:
    """Keeps the measurements of a running process for the forecast."""

    def __init__(self, plan: RemainingWork, *, began: float) -> None:
        """began: age of the run when this process began to count."""
        self._plan, self._began, self._done = plan, began, 0
        self._steps: deque[StepTime] = deque(maxlen=WINDOW)
        self._first: EvaluationTime | None = None

    def add_step(self, metrics: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl into account."""
        self._steps.append(step_time(metrics))
        self._done = metrics["step"]

    def add_evaluation(self, report: EvalReport) -> None:
        """Take an evaluation into account, if it is the first one and ran alone."""
        if self._first is None and not self._steps:
            self._first = EvaluationTime(problems=report.problems + report.ungraded, seconds=report.seconds)

    def seconds_left(self, age: float) -> float | None:
        """Return the time until the end of the run at this age of the run."""
        left = seconds_left(self._plan, self._done, list(self._steps), self._first, began=self._began)
        return None if left is None else max(0.0, left - (age - self._steps[-1].end))
