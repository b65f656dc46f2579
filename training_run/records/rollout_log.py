"""Rollout log: one line of rollouts.jsonl per group, trained on or discarded, with all its completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from protocols.rollout import Discarded, GroupOutcome
from protocols.sampling import CompletionTurn, FinishReason
from protocols.step import GroupsEnded, StepReport


class CompletionRecord(Struct, frozen=True, kw_only=True):
    """One completion of a group.

    reward, advantage: None if the group was discarded before they were computed. parts: value of each reward function.
    first_version, last_version: policy versions that sampled the first and the last token. tokens: number of tokens.
    turns: the parts of the text, if an environment inserted some.
    """

    text: str
    reward: float | None
    parts: dict[str, float | None]
    advantage: float | None
    first_version: int | None
    last_version: int | None
    finish_reason: FinishReason
    tokens: int
    turns: tuple[CompletionTurn, ...]


class RolloutRecord(Struct, frozen=True, kw_only=True):
    """One line of rollouts.jsonl.

    step: the step with which the group ended. reason, detail: why the group was discarded; None if it was trained on.
    environment: name of the Atropos environment; empty for the run's own dataset.
    """

    group_id: int
    step: int
    outcome: Literal["trained", "discarded"]
    reason: str | None
    detail: str | None
    prompt: str
    answer: str
    type: str
    environment: str
    completions: tuple[CompletionRecord, ...]


def rollout_records(report: StepReport | GroupsEnded) -> Iterator[RolloutRecord]:
    """Yield the record of every group that ended with a batch or between two batches, trained groups first."""
    for trained in report.trained if isinstance(report, StepReport) else ():
        yield _record(trained.scored, report.step, trained.advantages)
    for group in report.discarded:
        yield _record(group, report.step, ())


def _record(group: GroupOutcome, step: int, advantages: tuple[float, ...]) -> RolloutRecord:
    """Return the record of a group. advantages: one per completion; empty if the group was discarded."""
    prompt, discarded = group.prompt, group if isinstance(group, Discarded) else None
    return RolloutRecord(
        group_id=prompt.group_id,
        step=step,
        outcome="discarded" if discarded else "trained",
        reason=discarded.reason if discarded else None,
        detail=discarded.detail if discarded else None,
        prompt=prompt.problem.prompt,
        answer=prompt.problem.answer,
        type=prompt.problem.type,
        environment=prompt.source,
        completions=tuple(
            CompletionRecord(
                text=completion.text,
                reward=group.rewards[i] if group.rewards else None,
                parts={name: values[i] for name, values in group.parts.items()},
                advantage=advantages[i] if advantages else None,
                first_version=completion.versions[0] if completion.versions else None,
                last_version=completion.versions[-1] if completion.versions else None,
                finish_reason=completion.finish_reason,
                tokens=completion.length,
                turns=completion.turns,
            )
            for i, completion in enumerate(group.completions)
        ),
    )
