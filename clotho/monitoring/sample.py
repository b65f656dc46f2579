"""The completion of a batch that is put before a person."""

from __future__ import annotations

from msgspec import Struct

from protocols.prompt import Problem
from protocols.step import StepReport


class Sample(Struct, frozen=True, kw_only=True):
    """One completion of the last batch."""

    prompt: str
    answer: str
    completion: str
    reward: float | None


def sample(report: StepReport) -> Sample | None:
    """One completion of a batch, another of the group each time; None where there are none."""
    for group in report.trained:
        scored = group.scored
        i = report.step % len(scored.group.completions)
        return _sample(scored.group.prompt.problem, scored.group.completions[i].text, scored.rewards[i])
    for lost in report.discarded:
        if lost.completions:
            i = report.step % len(lost.completions)
            reward = lost.rewards[i] if lost.rewards else None
            return _sample(lost.prompt.problem, lost.completions[i].text, reward)
    return None


def _sample(problem: Problem, completion: str, reward: float | None) -> Sample:
    return Sample(prompt=problem.prompt, answer=problem.answer, completion=completion, reward=reward)
