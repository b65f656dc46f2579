"""The curriculum by success rate: its report for each step, and its state in a checkpoint."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class CurriculumState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learner -> checkpoint. The evidence on all problems after one batch.

    dataset: fingerprint of the problems; a state of other problems is not used.
    problems: index of each problem with a group, as little-endian int64, ascending. statuses, steps: status after its
    last group, and the step of this group relative to the present one; successes, completions: of this group; all as
    little-endian int64. groups, gradients: weight of all groups and of those with a gradient by type, status and age,
    as little-endian float64. lowest, highest: rewards of the run; None before the first group.
    """

    dataset: str
    problems: bytes = b""
    statuses: bytes = b""
    steps: bytes = b""
    successes: bytes = b""
    completions: bytes = b""
    groups: bytes = b""
    gradients: bytes = b""
    lowest: float | None = None
    highest: float | None = None


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
