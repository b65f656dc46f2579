"""The curriculum by success rate: its report for each step, and its parts of a checkpoint."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta, Struct


class CurriculumState(Struct, frozen=True, kw_only=True):
    """The small part of a curriculum in a checkpoint, beside its `CurriculumEvidence`.

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
    """Learner -> checkpointer, which counts the groups too. groups: those of one batch, in order."""

    state: CurriculumState
    groups: tuple[CountedGroup, ...]


class CurriculumEvidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`curriculum.msgpack` of a checkpoint: the last group of each problem, and how often groups had a gradient.

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


class CurriculumReport(Struct, frozen=True, kw_only=True):
    """The choice of problems in one step, as metrics.jsonl has it, each key with the prefix `curriculum/`."""

    zero_variance_expected: Annotated[
        float | None,
        Meta(
            description="Probability that all or none of a group's completions succeed, predicted when its problem was "
            "chosen; mean over the scored groups of the step; null without a curriculum."
        ),
    ] = None
    zero_variance_observed: Annotated[
        float | None, Meta(description="Share of these groups whose rewards are all equal.")
    ] = None
    success_rate: Annotated[
        float | None,
        Meta(description="Mean success rate of the last groups of all problems; null without a curriculum."),
    ] = None
    problems: Annotated[
        dict[str, int],
        Meta(
            description="Number of problems by the success rate of their last group, in five intervals; for problems "
            "without a group, the mean of their type. Empty without a curriculum."
        ),
    ] = {}
