"""What one consumed batch held of each environment, in numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean

from msgspec import Struct

from protocols.score import ScoredGroup


class EnvironmentMetrics(Struct, frozen=True, kw_only=True):
    """The groups of one environment that ended with a batch.

    discarded: by reason. reward_mean: over the completions of the trained ones, whose completion_tokens_mean counts the
    tokens that the policy drew. logprob_error_max: the largest difference, in nats, between the log-probabilities that
    came back through the environment and those that the engine drew with; None where none could be compared.
    """

    groups_trained: int
    groups_discarded: int
    discarded: dict[str, int]
    reward_mean: float | None
    completion_tokens_mean: float | None
    logprob_error_max: float | None


def environment_metrics(
    trained: Iterable[ScoredGroup], discarded: Mapping[tuple[str, str], int]
) -> dict[str, EnvironmentMetrics]:
    """By the environment's name; groups that the run asked itself are left out.

    discarded: how many, by environment and reason.
    """
    learnt: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    lost: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for group in trained:
        learnt[group.group.prompt.source].append(group)
    for (source, reason), count in discarded.items():
        lost[source][reason] = count
    return {name: _metrics(learnt[name], lost[name]) for name in sorted({*learnt, *lost}) if name}


def _metrics(trained: list[ScoredGroup], discarded: dict[str, int]) -> EnvironmentMetrics:
    rewards = [reward for group in trained for reward in group.rewards]
    lengths = [completion.length for group in trained for completion in group.group.completions]
    errors = [group.logprob_error for group in trained if group.logprob_error is not None]
    return EnvironmentMetrics(
        groups_trained=len(trained),
        groups_discarded=sum(discarded.values()),
        discarded=discarded,
        reward_mean=fmean(rewards) if rewards else None,
        completion_tokens_mean=fmean(lengths) if lengths else None,
        logprob_error_max=max(errors, default=None),
    )
