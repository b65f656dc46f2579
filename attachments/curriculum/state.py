"""What a checkpoint keeps of the curriculum by success rate, and what an update says of it."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct


class CurriculumState(Struct, frozen=True, kw_only=True):
    """The small part of what a curriculum has seen.

    dataset: fingerprint of the problems; evidence on other problems is not used. lowest, highest: rewards of the run;
    None before the first group.
    """

    dataset: str
    lowest: float | None = None
    highest: float | None = None


class CountedGroup(NamedTuple):
    """A group that the curriculum counted. problem: index of its problem."""

    problem: int
    successes: int
    completions: int


class CurriculumUpdate(Struct, frozen=True, kw_only=True):
    """What an update says: the state after it, and the groups that were counted for it, in order."""

    state: CurriculumState
    groups: tuple[CountedGroup, ...]


class CurriculumEvidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The large part: the last group of each problem, and how often groups had a gradient.

    Columns of little-endian numbers. problems: index of each problem with a group, ascending, uint32. statuses, ages:
    status after its last group, and the age of this group in steps, uint8; the greatest age stands for greater ones.
    successes, completions: of this group, uint16.
    cells: places in the table of types, statuses and ages that have groups, uint32. cell_ages: steps since a cell last
    changed, uint32. cell_groups, cell_gradients: weight of its groups, and of those with a gradient, at that time.
    groups, gradients: the same for all types together, by status and age, now. Weights are float64.
    """

    problems: bytes
    statuses: bytes
    ages: bytes
    successes: bytes
    completions: bytes
    cells: bytes
    cell_ages: bytes
    cell_groups: bytes
    cell_gradients: bytes
    groups: bytes
    gradients: bytes


class SavedCurriculum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint keeps of a curriculum."""

    state: CurriculumState
    evidence: CurriculumEvidence
