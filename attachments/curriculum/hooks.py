"""The curriculum in a run: hears of the groups that end, and keeps what it has seen in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from msgspec import structs

from attachments.curriculum.curriculum import Curriculum
from attachments.curriculum.group_outcomes import GroupOutcomes
from attachments.curriculum.state import CurriculumUpdate, SavedCurriculum
from protocols.checkpoint import Part
from protocols.rollout import Discarded
from protocols.step import TrainedGroup
from training_run.attachment import Attached
from training_run.directory.checkpoint_parts import Keeper
from training_run.supervision.hooks import Chooser, UpdateHook

NAME = "curriculum"
"""Name of its part in checkpoints."""


def take_part(attached: Attached, curriculum: Curriculum) -> None:
    """Let a curriculum choose the problems of a run that has not begun."""
    hook = CurriculumHook(curriculum)
    attached.chooser = CurriculumChooser(curriculum)
    attached.hooks.append(hook)
    attached.parts.save(NAME, hook.part, keeper=EvidenceKeeper(deepcopy(curriculum.outcomes)))


class CurriculumChooser(Chooser):
    """Lets a curriculum choose the problem of every group, when all groups have ended that may end before."""

    waits = True

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum

    def choose(self, group_id: int) -> int:
        """Return the index of the problem of a group."""
        return self.curriculum.choose(group_id)


class CurriculumHook(UpdateHook):
    """Tells a curriculum how groups have ended."""

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum = curriculum

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        """Record the groups."""
        self._curriculum.record([*(group.scored for group in trained), *discarded])

    def metrics(self) -> dict[str, Any]:
        """Count the groups of the step, and return how their problems were chosen."""
        report = structs.asdict(self._curriculum.end_step())
        return {f"curriculum/{name}": value for name, value in report.items()}

    def part(self) -> Part[CurriculumUpdate]:
        """Return what the step changed."""
        return Part(value=self._curriculum.update())


class EvidenceKeeper(Keeper[CurriculumUpdate]):
    """Counts the groups of every update as the curriculum does, because the evidence on all problems is large."""

    def __init__(self, outcomes: GroupOutcomes) -> None:
        """outcomes: a copy of those of the curriculum, at the start."""
        self._outcomes = outcomes

    def take(self, value: CurriculumUpdate) -> None:
        """Count the groups of an update."""
        self._outcomes.end_step(value.groups)

    def whole(self, value: CurriculumUpdate) -> Part[SavedCurriculum]:
        """Return the evidence after the update."""
        return Part(value=SavedCurriculum(state=value.state, evidence=self._outcomes.evidence()))
