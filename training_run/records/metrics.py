"""Metrics: one line of metrics.jsonl per step.

The update reports its own metrics, and they are written out unchanged. `METRICS` describes every key. A new metric of
the update needs a value in `training.objectives.loss` and a field of `UpdateMetrics`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import msgspec
from msgspec import Struct

from clotho.extension import TableDoor
from protocols import descriptions
from protocols.finding import Finding
from protocols.rollout import ScoredGroup, bounded
from protocols.step import StepReport, UpdateMetrics
from protocols.summary import RunGauges
from training_run.records.solved import Solved, count_solved, has_rewards

MetricsLine = dict[str, Any]
"""One line of metrics.jsonl: values by metric name."""


SOLVED_METRICS: dict[Solved, str] = {"all": "groups/solved_all", "none": "groups/solved_none", "mixed": "groups/mixed"}
"""The metric of groups of which all, none or some completions solved the problem."""

UPDATE_METRICS = descriptions(UpdateMetrics)
"""Metrics of the update by name. All are null for a batch without an update."""

METRICS = {
    "step": "Number of batches consumed.",
    "policy_version": "Policy version after the step; a step without an update keeps the version.",
    "weights_hash": "Hash of the trainable weights after the step.",
    "time/run": "Age of the run in seconds, summed over restarts.",
    "reward/mean": "Mean reward of all scored completions, trained on or discarded; null without rewards.",
    "reward/std": "Standard deviation of these rewards.",
    "rewards": "Of each reward function: `mean` and `std` of its values, `count`, the number of values, and "
    "`failures`, the number of groups for which it failed; a function that applied to no completion and never failed "
    "is missing.",
    **UPDATE_METRICS,
    "groups/trained": "Number of groups that the step trained on.",
    "groups/discarded": "Number of groups that were discarded since the line before.",
    "groups/discarded_by_reason": "Number of discarded groups by reason.",
    "groups/replaced": "Number of zero-variance groups that dynamic sampling replaced by another group.",
    "groups/solved_all": "Share of the scored groups whose completions all solve the problem: those that the rewards "
    "with `correct = true` accept, or without such a reward those whose rewards are all at least 1.",
    "groups/solved_none": "Share of the scored groups of which no completion solves the problem, or without such a "
    "reward of which no reward is above 0.",
    "groups/mixed": "Share of the other scored groups.",
    "staleness/mean": "Mean staleness of the trained groups: policy version of the learner minus the oldest version "
    "that sampled the group.",
    "staleness/max": "Largest staleness of a trained group.",
    "staleness/histogram": "Number of trained groups by staleness.",
    "completion_length/mean": "Mean number of tokens per completion.",
    "completion_length/terminated": "Mean number of tokens of the completions that ended with a stop token or a stop "
    "string.",
    "completion_length/total": "Total number of completion tokens of the step.",
    "truncated_fraction": "Fraction of completions that reached `sampling.max_tokens` or the context length.",
    "tokens_per_second": "Completion tokens of the step per second of wall-clock time since the line before, whenever "
    "they were sampled.",
    "decode_tokens_per_second/idle": "Tokens per second of decoding while the learner has no work.",
    "decode_tokens_per_second/learning": "Tokens per second of decoding while an update is computed.",
    "sequences_limit": "Sequences that are decoded at once at most; memory pressure lowers `engine.max_num_seqs`.",
    "time/decode": "Seconds of decode steps since the line before.",
    "time/update": "Seconds from the start to the end of the update.",
    "time/longest_learner_turn": "Longest turn of the update in seconds; on a GPU, nothing is decoded in it.",
    "time/wait_for_rollouts": "Seconds that the learner waited for groups before the update.",
    "time/weight_swap": "Seconds of the latest weight swap.",
    "peak_memory_bytes": "Peak memory of MLX arrays since the process started.",
    "findings": "Findings that apply at the step, by `name`. `severity`, `fact`, `consequence`, `advice`, `remedy`, "
    "`command` and `example` are in the line in which the finding begins, and later in the lines in which they change.",
    "rolled_back": "Whether the weights are those of an earlier version again.",
    "environments": "Metrics of each Atropos environment, by name.",
}
"""The keys of metrics.jsonl that every run has, with descriptions. docs/operating.md contains this table."""


ATTACHED_METRICS: TableDoor[str] = TableDoor("attachment.METRICS")
"""Metrics of attachments, with descriptions; null in a step of which nothing returns them."""


def all_metrics() -> dict[str, str]:
    """Return every key of metrics.jsonl with its description, those of attachments last."""
    return {**METRICS, **ATTACHED_METRICS()}


ENVIRONMENT_METRICS = {
    "groups/trained": "Number of groups of the environment that the step trained on.",
    "groups/discarded": "Number of discarded groups of the environment.",
    "groups/discarded_by_reason": "Number of discarded groups by reason.",
    "reward/mean": "Mean reward of the completions of the trained groups.",
    "completion_length/mean": "Mean number of sampled tokens per completion of the trained groups.",
    "logprob_error_max": "Largest difference, in nats, between log-probabilities that the environment returned and "
    "those of the engine; null if none could be compared.",
}
"""Every key of an entry of `environments`."""


class Measurement(Struct, frozen=True, kw_only=True):
    """Age of the run, and values of the gauges. The findings are those of the line that was written then."""

    seconds: float
    gauges: RunGauges


def step_metrics(
    report: StepReport,
    *,
    now: Measurement,
    before: Measurement,
    measured: Mapping[str, Any] = {},
    discarded_between: Mapping[tuple[str, str], int] = {},
    failures_between: Mapping[str, int] = {},
    solved_between: Mapping[Solved, int] = {},
) -> MetricsLine:
    """Return the line of metrics.jsonl for a report, with the change of the gauges since the line before.

    measured: metrics of attachments. discarded_between: number of groups that were discarded while the batch was
    collected, by (environment, reason). failures_between: number of these groups for which a reward function
    failed, by function. solved_between: number of these groups by which of their completions solved the problem.
    """
    discarded = Counter(discarded_between)
    discarded.update((group.prompt.source, group.reason) for group in report.discarded)
    seconds = now.seconds - before.seconds
    completions = _completion_metrics(report)
    rewards = [reward for group in report.ended if has_rewards(group) for reward in group.rewards if bounded([reward])]
    return {
        "step": report.step,
        "policy_version": report.version,
        "weights_hash": report.fingerprint,
        "time/run": now.seconds,
        "reward/mean": _mean(rewards),
        "reward/std": pstdev(rewards) if rewards else None,
        "rewards": reward_parts(report, failures_between),
        **dict.fromkeys(UPDATE_METRICS),
        **_update_metrics(report),
        **_group_metrics(report, discarded),
        **_solved_metrics(report, solved_between),
        **dict.fromkeys(ATTACHED_METRICS()),
        **report.metrics,
        **measured,
        **completions,
        "tokens_per_second": completions["completion_length/total"] / seconds if seconds > 0 else None,
        "decode_tokens_per_second/idle": now.gauges.decode_rate_idle,
        "decode_tokens_per_second/learning": now.gauges.decode_rate_learning,
        "sequences_limit": now.gauges.rows_limit,
        "time/decode": now.gauges.decode_seconds - before.gauges.decode_seconds,
        "time/update": report.train_seconds,
        "time/longest_learner_turn": report.longest_turn_seconds,
        "time/wait_for_rollouts": report.wait_seconds,
        "time/weight_swap": now.gauges.swap_seconds_last,
        "peak_memory_bytes": now.gauges.peak_memory_bytes,
        "findings": _finding_changes(now.gauges.findings, before.gauges.findings),
        "rolled_back": report.rolled_back,
        "environments": environment_metrics([group.scored for group in report.trained], discarded),
    }


def _finding_changes(now: Iterable[Finding], before: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return the name of each finding with the fields that differ from the line before; all fields if it begins."""
    known = {finding.name: msgspec.structs.asdict(finding) for finding in before}
    changes = []
    for finding in now:
        earlier = known.get(finding.name, {})
        fields = msgspec.structs.asdict(finding).items()
        changes.append({key: value for key, value in fields if key == "name" or earlier.get(key) != value})
    return changes


def environment_metrics(
    trained: Iterable[ScoredGroup], discarded: Mapping[tuple[str, str], int]
) -> dict[str, MetricsLine]:
    """Return the metrics of each environment by name. Groups from the run's own dataset are not included.

    discarded: number of groups by (environment, reason).
    """
    trained_by_source: defaultdict[str, list[ScoredGroup]] = defaultdict(list)
    discarded_by_source: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for group in trained:
        trained_by_source[group.group.prompt.source].append(group)
    for (source, reason), count in discarded.items():
        discarded_by_source[source][reason] = count
    sources = sorted({*trained_by_source, *discarded_by_source} - {""})
    return {name: _environment(trained_by_source[name], discarded_by_source[name]) for name in sources}


def _environment(trained: list[ScoredGroup], discarded: dict[str, int]) -> MetricsLine:
    rewards = [reward for group in trained for reward in group.rewards]
    lengths = [completion.length for group in trained for completion in group.group.completions]
    errors = [group.logprob_error for group in trained if group.logprob_error is not None]
    return {
        "groups/trained": len(trained),
        "groups/discarded": sum(discarded.values()),
        "groups/discarded_by_reason": discarded,
        "reward/mean": _mean(rewards),
        "completion_length/mean": _mean(lengths),
        "logprob_error_max": max(errors, default=None),
    }


def _update_metrics(report: StepReport) -> MetricsLine:
    """Return the metrics of the update. A value that the update did not compute is None."""
    update = report.update
    if update is None:
        return {}
    before = report.version - int(update.update_applied)
    trained = [completion for group in report.trained for completion in group.scored.completions]
    on_policy = any(completion.versions[-1:] == (before,) for completion in trained)
    has_teacher = any(group.scored.teacher for group in report.trained)
    return msgspec.structs.asdict(update) | {
        "kl": update.kl if update.kl_beta > 0 else None,
        "mismatch_kl": update.mismatch_kl if on_policy or report.rolled_back else None,
        "unmoved_cut_fraction": update.unmoved_cut_fraction if on_policy or report.rolled_back else None,
        "distillation_loss": update.distillation_loss if has_teacher else None,
    }


def reward_parts(report: StepReport, failures_between: Mapping[str, int] = {}) -> dict[str, MetricsLine]:
    """Return mean, standard deviation and number of the values of each reward function, and its failed groups."""
    failures = Counter(failures_between)
    failures.update(name for group in report.discarded for name in group.failed_rewards)
    values: defaultdict[str, list[float]] = defaultdict(list, {name: [] for name in failures})
    for group in report.ended:
        for name, found in group.parts.items():
            values[name] += [value for value in found if value is not None and bounded([value])]
    return {
        name: {
            "mean": _mean(found),
            "std": pstdev(found) if found else None,
            "count": len(found),
            "failures": failures[name],
        }
        for name, found in sorted(values.items())
        if found or failures[name]
    }


def _group_metrics(report: StepReport, discarded: Counter[tuple[str, str]]) -> MetricsLine:
    reasons = Counter[str]()
    for (_, reason), count in discarded.items():
        reasons[reason] += count
    return {
        "groups/trained": len(report.trained),
        "groups/discarded": discarded.total(),
        "groups/discarded_by_reason": dict(reasons),
        "groups/replaced": report.replaced,
        "staleness/mean": _mean(report.staleness),
        "staleness/max": max(report.staleness, default=None),
        "staleness/histogram": dict(sorted(Counter(report.staleness).items())),
    }


def _solved_metrics(report: StepReport, between: Mapping[Solved, int]) -> MetricsLine:
    counts = count_solved(report.ended)
    counts.update(between)
    total = counts.total()
    return {name: counts[solved] / total if total else None for solved, name in SOLVED_METRICS.items()}


def _completion_metrics(report: StepReport) -> MetricsLine:
    completions = [completion for group in report.ended for completion in group.completions]
    lengths = [completion.length for completion in completions]
    return {
        "completion_length/mean": _mean(lengths),
        "completion_length/terminated": _mean([one.length for one in completions if one.finish_reason == "stop"]),
        "completion_length/total": sum(lengths),
        "truncated_fraction": _mean([completion.finish_reason == "length" for completion in completions]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
