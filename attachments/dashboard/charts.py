"""The charts of the overview: sections, titles, and the columns of metrics.jsonl and evaluations.jsonl."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from training_run.attachment import attached_entries
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.metrics import all_metrics

Format = Literal["number", "percent", "bytes", "seconds"]


class ChartLine(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a chart.

    column: name of a column. A `*` stands for all columns that match; a `*` in the other texts is what it matches.
    spread: column with the standard deviation, drawn as a band. low, high: columns with the edges of the band.
    """

    label: str
    column: str
    spread: str | None = None
    low: str | None = None
    high: str | None = None
    dash: bool = False


class Chart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chart of the overview.

    table: the file of its columns. lead: it is large, and before all sections. neutral: a chart with only this value
    says nothing, and is folded.
    """

    id: str
    section: str
    title: str
    series: tuple[ChartLine, ...]
    description: str = ""
    format: Format = "number"
    table: Literal["metrics", "evaluations"] = "metrics"
    lead: bool = False
    neutral: float = 0.0


HIDDEN = (
    "step", "policy_version", "time/run", "reward/std", "update_applied", "rolled_back",
    "rewards/*/std", "rewards/*/count", "lines",
)  # fmt: skip
"""Columns without a chart: the axes, counters of other charts, and what the page shows as marks."""

_ONE_DEVIATION = "The band is one standard deviation."
_INTERVAL = "The band is the interval of 95 %."


def _chart(section: str, title: str, *series: ChartLine, note: str = "", **other: Any) -> Chart:
    """Return a chart with the descriptions of its metrics."""
    descriptions = EVALUATION_METRICS if other.get("table") == "evaluations" else all_metrics()
    columns = [line.column.split("/*")[0] for line in series]
    texts = dict.fromkeys(descriptions.get(name, descriptions.get(name.rpartition("/")[0], "")) for name in columns)
    name = title.lower().replace(" ", "-")
    return Chart(
        id=name,
        section=section,
        title=title,
        series=series,
        description=" ".join(filter(None, (*texts, note))),
        **other,
    )


def _line(label: str, column: str, **other: Any) -> ChartLine:
    return ChartLine(label=label, column=column, **other)


def _estimate(label: str, column: str, **other: Any) -> ChartLine:
    """Return the line of a mean with its interval as a band."""
    return _line(label, f"{column}/value", low=f"{column}/low", high=f"{column}/high", **other)


def _note(table: str, metric: str) -> str:
    """Return the description of a metric of the entries of a table; empty if its attachment is not installed."""
    return attached_entries().get(table, {}).get(metric, "")


def _by_server(title: str, metric: str, **other: Any) -> Chart:
    """Return the chart of a metric of the remote inference servers, with a line for each server."""
    note = _note("remote_servers", metric)
    return _chart("Speed", f"{title} by server", _line("*", f"remote_servers/*/{metric}"), note=note, **other)


def _by_rank(title: str, metric: str, **other: Any) -> Chart:
    """Return the chart of a metric of the ranks of a data-parallel learner, with a line for each rank."""
    note = _note("learner_ranks", metric)
    return _chart("Speed", f"{title} by rank", _line("rank *", f"learner_ranks/*/{metric}"), note=note, **other)


CHARTS = (
    _chart("Learning", "Reward", _line("mean", "reward/mean", spread="reward/std"), note=_ONE_DEVIATION, lead=True),
    _chart(
        "Learning",
        "Held-out accuracy",
        _line("accuracy", "accuracy", low="accuracy_interval/low", high="accuracy_interval/high"),
        _line("*", "accuracy_by_type/*", dash=True),
        note=_INTERVAL,
        table="evaluations",
        format="percent",
        lead=True,
    ),
    _chart("Learning", "Reward by part", _line("*", "rewards/*/mean", spread="rewards/*/std"), note=_ONE_DEVIATION),
    _chart(
        "Learning",
        "Sampled accuracy",
        _estimate("avg@k", "avg_at_k"),
        _estimate("pass@*", "pass_at/*"),
        note=_INTERVAL,
        table="evaluations",
        format="percent",
    ),
    _chart(
        "Learning",
        "Held-out reward",
        _estimate("greedy", "reward"),
        _estimate("sampled", "sampled_reward"),
        note=_INTERVAL,
        table="evaluations",
    ),
    _chart("Learning", "Held-out reward by part", _estimate("*", "rewards/*"), note=_INTERVAL, table="evaluations"),
    _chart("Learning", "Held-out loss", _estimate("references", "loss"), note=_INTERVAL, table="evaluations"),
    _chart(
        "Learning",
        "Ungraded held-out problems",
        _line("no reward applies", "ungraded"),
        _line("with failed rewards", "failed"),
        table="evaluations",
    ),
    _chart("Learning", "Failures of rewards", _line("*", "rewards/*/failures")),
    _chart("Update", "Loss", _line("loss", "loss")),
    _chart("Update", "KL", _line("to the reference policy", "kl"), _line("of the update", "update_kl")),
    _chart("Update", "Entropy", _line("entropy", "entropy")),
    _chart(
        "Update",
        "Clip fraction",
        _line("clipped", "clip_fraction"),
        _line("rejected", "rejected_fraction"),
        _line("before the policy moved", "unmoved_cut_fraction"),
        format="percent",
    ),
    _chart("Update", "Gradient norm", _line("norm", "grad_norm")),
    _chart("Update", "Learning rate", _line("rate", "learning_rate")),
    _chart("Update", "Step scale", _line("factor of the learning rate", "step_scale"), neutral=1.0),
    _chart("Off-policy", "Staleness", _line("mean", "staleness/mean"), _line("max", "staleness/max")),
    _chart(
        "Off-policy",
        "Effective sample size",
        _line("share of the tokens", "ess"),
        _line("share of the completions", "completion_ess"),
        format="percent",
    ),
    _chart("Off-policy", "Sampler mismatch", _line("KL", "mismatch_kl")),
    _chart("Off-policy", "Importance ratio", _line("mean", "ratio_mean")),
    _chart("Completions", "Completion length", _line("mean", "completion_length/mean")),
    _chart("Completions", "Truncation", _line("truncated", "truncated_fraction"), format="percent"),
    _chart("Completions", "Held-out length", _line("mean", "completion_length/mean"), table="evaluations"),
    _chart(
        "Completions",
        "Held-out truncation",
        _line("truncated", "truncated_fraction"),
        table="evaluations",
        format="percent",
    ),
    _chart(
        "Completions", "Groups per step", _line("trained", "groups/trained"), _line("discarded", "groups/discarded")
    ),
    _chart("Completions", "Discards by reason", _line("*", "groups/discarded_by_reason/*")),
    _chart(
        "Completions",
        "Curriculum",
        _line("zero variance, expected", "curriculum/zero_variance_expected", dash=True),
        _line("zero variance, observed", "curriculum/zero_variance_observed"),
        _line("success rate", "curriculum/success_rate"),
        format="percent",
    ),
    _chart("Completions", "Problems by success rate", _line("*", "curriculum/problems/*")),
    _chart(
        "Speed",
        "Tokens per second",
        _line("completions", "tokens_per_second"),
        _line("decoding, learner idle", "decode_tokens_per_second/idle"),
        _line("decoding, learning", "decode_tokens_per_second/learning"),
    ),
    _chart(
        "Speed",
        "Seconds per step",
        _line("update", "time/update"),
        _line("wait for rollouts", "time/wait_for_rollouts"),
        _line("decode", "time/decode"),
        format="seconds",
    ),
    _chart(
        "Speed",
        "Delays of decoding",
        _line("longest turn of the learner", "time/longest_learner_turn"),
        _line("weight swap", "time/weight_swap"),
        format="seconds",
    ),
    _by_server("Tokens per second", "tokens_per_second"),
    _by_server("Version lag", "lag"),
    _by_server("Completions in flight", "rows"),
    _by_server("Weight push", "push_seconds", format="seconds"),
    _by_server("Bytes sent", "bytes_sent", format="bytes"),
    _by_server("Bytes received", "bytes_received", format="bytes"),
    _by_server("Failures", "failures"),
    _by_server("Restarts", "restarts"),
    _by_rank("Work", "positions"),
    _by_rank("Seconds of shares", "seconds", format="seconds"),
    _by_rank("Positions per second", "positions_per_second"),
    _by_rank("Bytes sent", "bytes_sent", format="bytes"),
    _chart("Speed", "Wait for ranks", _line("rank 0", "time/wait_for_ranks"), format="seconds"),
    _chart(
        "Machine",
        "Memory",
        _line("MLX, peak", "peak_memory_bytes"),
        _line("process", "resources/resident_bytes"),
        _line("available", "resources/available_bytes"),
        format="bytes",
    ),
    _chart(
        "Machine",
        "Swap",
        _line("in use", "resources/swap_bytes"),
        _line("change", "resources/swap_change_bytes"),
        format="bytes",
    ),
    _chart(
        "Machine",
        "Load",
        _line("CPU", "resources/cpu_share"),
        _line("GPU", "resources/gpu_share"),
        format="percent",
    ),
    _chart("Machine", "Power", _line("watts", "resources/power_watts")),
)


def chart_catalogue() -> list[dict[str, Any]]:
    """Return the charts as JSON objects."""
    found: list[dict[str, Any]] = msgspec.to_builtins(CHARTS)
    return found
