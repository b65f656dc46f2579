"""A line of metrics.jsonl: what one consumed batch did, in numbers.

What one consumed batch held of each environment, in numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import isfinite
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec
from msgspec import Struct

from protocols.evaluation import EvalReport
from protocols.rollout import ScoredGroup
from protocols.sampling import Completion
from protocols.step import StepReport
from protocols.summary import RunGauges


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
    learned: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    lost: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for group in trained:
        learned[group.group.prompt.source].append(group)
    for (source, reason), count in discarded.items():
        lost[source][reason] = count
    return {name: _metrics(learned[name], lost[name]) for name in sorted({*learned, *lost}) if name}


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


class StepMetrics(Struct, frozen=True, kw_only=True):
    """One consumed batch. Numbers of the update are None where the batch taught nothing.

    reward_mean, reward_std: over every completion with a finite reward, whether its group was trained or discarded.
    groups_trained, groups_discarded, discarded: groups that ended with this batch, the latter by reason.
    groups_refilled: of them, those that were asked in place of others (`learner.dynamic_sampling`).
    groups_replayed: groups of earlier batches that the update learned from again. alarms: signs of collapse.
    rolled_back: whether the policy is an earlier one again. environments: what came from each.
    completion_tokens: of those groups, summed; completion_tokens_mean: per completion; truncated: share of completions
    that ran out of tokens. staleness: versions between the oldest token of a trained group and the update;
    staleness_histogram: trained groups by their staleness.
    tokens_per_second: sampled since the line before, by everyone who samples, per second of wall-clock time.
    decode_seconds: the compute thread spent decoding since the line before. train_seconds: inside the update;
    wait_seconds: waiting for groups. swap_seconds: the latest. seconds: since the run began, all its lives.
    """

    step: int
    policy_version: int
    fingerprint: str
    seconds: float
    reward_mean: float | None
    reward_std: float | None
    loss: float | None = None
    kl: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    mismatch_kl: float | None = None
    ratio_mean: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    applied: bool | None = None
    ess: float | None = None
    rejected_fraction: float | None = None
    kl_beta: float | None = None
    entropy_weight: float | None = None
    optimizer_steps: int | None = None
    step_kl: float | None = None
    distillation: float | None = None
    groups_trained: int
    groups_discarded: int
    discarded: dict[str, int]
    groups_refilled: int
    groups_replayed: int
    alarms: tuple[str, ...]
    rolled_back: bool
    staleness_mean: float | None
    staleness_max: int | None
    staleness_histogram: dict[int, int]
    completion_tokens: int
    completion_tokens_mean: float | None
    truncated: float | None
    tokens_per_second: float | None
    decode_seconds: float
    train_seconds: float
    wait_seconds: float
    swap_seconds: float | None
    decode_rate_idle: float | None
    decode_rate_learning: float | None
    peak_memory_bytes: int
    environments: dict[str, EnvironmentMetrics] = {}


class Moment(Struct, frozen=True, kw_only=True):
    """When a line is written, and what the gauges said."""

    seconds: float
    gauges: RunGauges


def step_metrics(
    report: StepReport, *, now: Moment, before: Moment, ended_early: Mapping[tuple[str, str], int] = {}
) -> StepMetrics:
    """Put a report and the change of the gauges since the line before into one line.

    ended_early: groups that were discarded while its batch was forming, by environment and reason; only counted.
    """
    discarded = Counter(ended_early)
    discarded.update((group.prompt.source, group.reason) for group in report.discarded)
    reasons = Counter[str]()
    for (_, reason), count in discarded.items():
        reasons[reason] += count
    rewards = _rewards(report)
    completions = _completions(report)
    lengths = [completion.length for completion in completions]
    passed = now.seconds - before.seconds
    sampled = now.gauges.tokens_sampled - before.gauges.tokens_sampled
    update = msgspec.structs.asdict(report.update) if report.update else {}
    update.pop("tokens", None)
    return StepMetrics(
        step=report.step,
        policy_version=report.version,
        fingerprint=report.fingerprint,
        seconds=now.seconds,
        reward_mean=_mean(rewards),
        reward_std=pstdev(rewards) if rewards else None,
        **update,
        groups_trained=len(report.trained),
        groups_discarded=discarded.total(),
        discarded=dict(reasons),
        groups_refilled=report.replaced,
        groups_replayed=report.replayed,
        alarms=report.collapse_warnings,
        rolled_back=report.rolled_back,
        staleness_mean=_mean(report.staleness),
        staleness_max=max(report.staleness, default=None),
        staleness_histogram=dict(sorted(Counter(report.staleness).items())),
        completion_tokens=sum(lengths),
        completion_tokens_mean=_mean(lengths),
        truncated=_mean([completion.finish_reason == "length" for completion in completions]),
        tokens_per_second=sampled / passed if passed > 0 else None,
        decode_seconds=now.gauges.decode_seconds - before.gauges.decode_seconds,
        train_seconds=report.train_seconds,
        wait_seconds=report.wait_seconds,
        swap_seconds=now.gauges.swap_seconds_last,
        decode_rate_idle=now.gauges.decode_rate_idle,
        decode_rate_learning=now.gauges.decode_rate_learning,
        peak_memory_bytes=now.gauges.peak_memory_bytes,
        environments=environment_metrics([group.scored for group in report.trained], discarded),
    )


def evaluation_fields(report: EvalReport) -> dict[str, Any]:
    """A measurement as keys: of the line of the step it was made at, or of a line of its own."""
    return {
        "eval_accuracy": report.accuracy,
        "eval_by_type": report.by_type,
        "eval_problems": report.problems,
        "eval_completion_tokens": report.completion_tokens,
        "eval_seconds": report.seconds,
        "eval_final": report.final,
    }


def _rewards(report: StepReport) -> list[float]:
    rewards = [reward for group in report.trained for reward in group.scored.rewards]
    rewards += [reward for group in report.discarded for reward in group.rewards]
    return [reward for reward in rewards if isfinite(reward)]


def _completions(report: StepReport) -> list[Completion]:
    trained = [completion for group in report.trained for completion in group.scored.group.completions]
    return trained + [completion for group in report.discarded for completion in group.completions]


def _mean(values: list[float] | list[int] | list[bool] | tuple[int, ...]) -> float | None:
    return fmean(values) if values else None


class RunHistory(Struct, frozen=True, kw_only=True):
    """What metrics.jsonl says of the earlier lives of a run.

    before: the base policy's measurement; after: the newest that was the last of a life. None where it was not made.
    """

    seconds: float
    before: EvalReport | None
    after: EvalReport | None


def read_history(path: Path) -> RunHistory:
    """Read the age of a run, and how its base policy did. A file that does not exist is a run that begins."""
    seconds, before, after = 0.0, None, None
    if path.exists():
        for line in path.read_bytes().splitlines():
            record = msgspec.json.decode(line, type=dict[str, Any])
            seconds = max(seconds, record.get("seconds") or 0.0)
            if record.get("step") == 0 and "eval_accuracy" in record:
                before = _evaluation(record)
            if record.get("eval_final"):
                after = _evaluation(record)
    return RunHistory(seconds=seconds, before=before, after=after)


def _evaluation(record: dict[str, Any]) -> EvalReport:
    return EvalReport(
        step=record["step"],
        version=record["policy_version"],
        problems=record["eval_problems"],
        accuracy=record["eval_accuracy"],
        by_type=record["eval_by_type"],
        completion_tokens=record["eval_completion_tokens"],
        seconds=record["eval_seconds"],
        final=record["eval_final"],
    )
