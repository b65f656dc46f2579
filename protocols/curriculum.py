"""The curriculum by success rate: its report for each step, and its state in a checkpoint."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class TypeEvidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What scored groups say about the problems of one type. Older groups count less.

    groups: weight of the groups. rates: weighted sum of s / n over groups with s successes among n completions.
    pairs: weighted sum of s (s - 1) / (n (n - 1)), the share of pairs of completions that both succeed.
    """

    groups: float
    rates: float
    pairs: float


class CurriculumState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learner -> checkpoint. The posterior over the success rates of all problems after one batch.

    dataset: fingerprint of the problems; a state of other problems is not used.
    problems: index of each problem with evidence, as little-endian int64, ascending.
    successes, failures: numbers of its completions, as little-endian float64; older completions count less.
    types: evidence by type. lowest, highest: rewards of the run; None before the first group.
    """

    dataset: str
    problems: bytes = b""
    successes: bytes = b""
    failures: bytes = b""
    types: dict[str, TypeEvidence] = {}
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
        Meta(description="Mean estimated success rate of all problems for training; null without a curriculum."),
    ] = None
    problems: Annotated[
        dict[str, int],
        Meta(
            description="Number of problems by estimated success rate, in five intervals; the estimate of a problem "
            "without recent groups is the mean of its type. Empty without a curriculum."
        ),
    ] = {}
