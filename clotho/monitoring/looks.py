"""How a batch looks, from the learner's report of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isfinite
from statistics import fmean, stdev

from protocols.alarms import BatchLook, GroupLook
from protocols.sampling import Completion
from protocols.step import StepReport

FORM = "format"
"""The reward part that judges form alone. Without one of this name, form without content is not looked at."""

NO_CONTENT = (FORM, "overlong")
"""Parts of a reward that say nothing of content."""

Parts = Mapping[str, Sequence[float | None]]


def group_looks(report: StepReport) -> Iterator[GroupLook]:
    """Every group of the batch that was scored, whether it was trained on or discarded, the trained ones first.

    Stale ones are left out: an older policy drew them, perhaps one that was given up.
    """
    for trained in report.trained:
        scored = trained.scored
        yield from _group(scored.group.prompt.source, scored.group.completions, scored.rewards, scored.parts)
    for lost in report.discarded:
        if lost.reason != "stale":
            yield from _group(lost.prompt.source, lost.completions, lost.rewards, lost.parts)


def batch_look(groups: Sequence[GroupLook], report: StepReport) -> BatchLook:
    """Groups together, each counted the same, and the numbers of the update if one was made."""
    reward = [group.reward for group in groups]
    by_source: dict[str, list[float]] = {}
    for group in groups:
        by_source.setdefault(group.source, []).append(group.reward)
    update = report.update if report.update and report.update.applied else None
    return BatchLook(
        reward=_mean(reward),
        reward_error=stdev(reward) / len(reward) ** 0.5 if len(reward) > 1 else None,
        rewards={source: fmean(values) for source, values in by_source.items()},
        shares={source: len(values) / len(groups) for source, values in by_source.items()},
        length=_mean([group.length for group in groups]),
        truncated=_mean([group.truncated for group in groups]),
        empty_form=_mean([group.empty_form for group in groups]),
        content=_mean([group.content for group in groups]),
        entropy=_finite(update.entropy) if update else None,
        kl=_finite(update.kl) if update and update.kl_beta > 0 else None,
        ess=_finite(update.ess) if update else None,
        step_kl=_distance(update.step_kl) if update else None,
    )


def _group(
    source: str, completions: Sequence[Completion], rewards: Sequence[float], parts: Parts
) -> Iterator[GroupLook]:
    if not rewards or not all(map(isfinite, rewards)):
        return
    judged = list(_content(parts, len(rewards)))
    yield GroupLook(
        source=source,
        reward=fmean(rewards),
        lowest=min(rewards),
        length=fmean(completion.length for completion in completions),
        truncated=fmean(completion.finish_reason == "length" for completion in completions),
        empty_form=_mean([form == 1.0 and not content for form, content in judged]),
        content=_mean([content for _, content in judged]),
    )


def _content(parts: Parts, count: int) -> Iterator[tuple[float, bool]]:
    """Form, and whether there is any content, of every completion that is judged by both."""
    for i in range(count):
        form = parts[FORM][i] if FORM in parts else None
        content = [row[i] for name, row in parts.items() if name not in NO_CONTENT]
        marks = [value for value in content if value is not None]
        if form is not None and marks:
            yield form, any(value > 0 for value in marks)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _distance(value: float | None) -> float | None:
    """What is no number is beyond every bound: weights whose probabilities are none are as far away as can be."""
    return value if value is None or isfinite(value) else inf


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
