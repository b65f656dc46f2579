"""The charts of the overview: sections, titles, and the columns of metrics.jsonl and evaluations.jsonl.

Descriptions and units follow from the registered metrics. The charts of attachments follow from them altogether.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from clotho.extension import found
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.metrics import all_metrics

Format = Literal["number", "percent", "bytes", "seconds"]


class Chart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chart of the overview.

    series: label of each line -> its column. A `*` in a column stands for all columns that match; a `*` in the label is
    what it matches. A column that is a table stands for its entries. A line has a band if its column has neighbours
    for one: `low` and `high` beside a `value` or below it, `std` beside a `mean`. table: the file of the columns. lead:
    it is large, and before all sections. neutral: a chart with only this value says nothing, and is folded.
    """

    id: str
    section: str
    title: str
    series: dict[str, str]
    description: str
    format: Format = "number"
    table: Literal["metrics", "evaluations"] = "metrics"
    lead: bool = False
    neutral: float = 0.0


HIDDEN = (
    "step", "policy_version", "time/run", "reward/std", "update_applied", "rolled_back",
    "rewards/*/std", "rewards/*/count", "lines",
)  # fmt: skip
"""Columns without a chart: the axes, counters of other charts, and what the page shows as marks."""

EVALUATIONS = "evaluations/"
"""Begins the names of columns of evaluations.jsonl, here and among the descriptions of the overview."""

LEADS = ("Reward", "Held-out accuracy")
NEUTRAL = {"Step scale": 1.0}

CORE: dict[str, dict[str, dict[str, str]]] = {
    "Learning": {
        "Reward": {"mean": "reward/mean"},
        "Held-out accuracy": {"accuracy": "evaluations/accuracy", "*": "evaluations/accuracy_by_type/*"},
        "Reward by part": {"*": "rewards/*/mean"},
        "Solved by the completions of a group": {
            "all": "groups/solved_all", "none": "groups/solved_none", "some": "groups/mixed",
        },
        "Sampled accuracy": {"avg@k": "evaluations/avg_at_k/value", "pass@*": "evaluations/pass_at/*/value"},
        "Held-out reward": {"greedy": "evaluations/reward/value", "sampled": "evaluations/sampled_reward/value"},
        "Held-out reward by part": {"*": "evaluations/rewards/*/value"},
        "Held-out loss": {"references": "evaluations/loss/value"},
        "Ungraded held-out problems": {
            "no reward applies": "evaluations/ungraded", "with failed rewards": "evaluations/failed",
        },
        "Failures of rewards": {"*": "rewards/*/failures"},
    },
    "Update": {
        "Loss": {"loss": "loss"},
        "Perplexity": {"demonstrations": "perplexity"},
        "Preferences": {"share of pairs in order": "preference_accuracy", "margin": "preference_margin"},
        "Log-ratio to the reference": {"better": "better_log_ratio", "worse": "worse_log_ratio"},
        "KL": {"to the reference policy": "kl", "of the update": "update_kl"},
        "Entropy": {"entropy": "entropy"},
        "Clip fraction": {
            "clipped": "clip_fraction",
            "below the range": "clip_fraction_low",
            "above the range": "clip_fraction_high",
            "rejected": "rejected_fraction",
            "before the policy moved": "unmoved_cut_fraction",
        },
        "Gradient norm": {"norm": "grad_norm"},
        "Tokens per expert": {
            "most used": "expert_share_max", "least used": "expert_share_min", "unused": "unused_experts_fraction",
        },
        "Flipped routes": {"per layer and 1,000 tokens": "flipped_routes"},
        "Learning rate": {"rate": "learning_rate"},
        "Step scale": {"factor of the learning rate": "step_scale"},
    },
    "Off-policy": {
        "Staleness": {"mean": "staleness/mean", "max": "staleness/max"},
        "Effective sample size": {"share of the tokens": "ess", "share of the completions": "completion_ess"},
        "Sampler mismatch": {"KL": "mismatch_kl"},
        "Importance ratio": {"mean": "ratio_mean"},
    },
    "Completions": {
        "Completion length": {"mean": "completion_length/mean", "terminated": "completion_length/terminated"},
        "Truncation": {"truncated": "truncated_fraction"},
        "Held-out length": {"mean": "evaluations/completion_length/mean"},
        "Held-out truncation": {"truncated": "evaluations/truncated_fraction"},
        "Groups per step": {"trained": "groups/trained", "discarded": "groups/discarded"},
        "Discards by reason": {"*": "groups/discarded_by_reason/*"},
    },
    "Speed": {
        "Tokens per second": {
            "completions": "tokens_per_second",
            "decoding, learner idle": "decode_tokens_per_second/idle",
            "decoding, learning": "decode_tokens_per_second/learning",
        },
        "Seconds per step": {
            "update": "time/update", "wait for rollouts": "time/wait_for_rollouts", "decode": "time/decode",
        },
        "Delays of decoding": {
            "longest turn of the learner": "time/longest_learner_turn", "weight swap": "time/weight_swap",
        },
        "Peak memory": {"MLX arrays": "peak_memory_bytes"},
    },
}  # fmt: skip
"""The charts of the metrics that every run has: section -> title -> label of a line -> its column."""

UNITS: tuple[tuple[Format, re.Pattern[str]], ...] = (
    ("bytes", re.compile(r"bytes")),
    (
        "percent",
        re.compile(r"fraction|share|accuracy|success_rate|groups/solved|zero_variance_|(^|/|_)ess$|avg_at_k|pass_at"),
    ),
    ("seconds", re.compile(r"(^|/)time/|(^|_|/)(?<!per_)seconds$")),
)
"""The unit of a column by its name; others are numbers."""


def unit(column: str) -> Format:
    """Return how the values of a column are written."""
    return next((found for found, name in UNITS if name.search(column)), "number")


def charts() -> list[Chart]:
    """Return the charts of metrics that every run has, and those of the attachments that are installed."""
    core = [_chart(section, title, lines) for section, titles in CORE.items() for title, lines in titles.items()]
    return [
        *core,
        *(
            chart
            for folder, metrics in found("attachment.METRICS").items()
            for chart in _of_attachment(folder, metrics)
        ),
    ]


def _of_attachment(folder: str, metrics: Mapping[str, str]) -> Iterator[Chart]:
    """Yield a chart for each key of its tables, with a line for each entry; and one for the other metrics of a unit."""
    section, tables = folder.replace("_", " ").capitalize(), found("attachment.ENTRIES").get(folder, {})
    groups = dict[str, dict[str, str]]()
    for name in metrics:
        for key, text in tables.get(name, {}).items():
            yield _chart(section, f"{section}: {key.replace('_', ' ')}", {"*": f"{name}/*/{key}"}, text)
        if name not in tables:
            words, kind = name.rpartition("/")[2].replace("_", " "), unit(name)
            title = f"{section}: {words}" if kind in ("number", "seconds") else f"{section}, {kind}"
            groups.setdefault(title, {})[words] = name
    for title, lines in groups.items():
        yield _chart(section, title, lines)


def _chart(section: str, title: str, lines: Mapping[str, str], description: str = "") -> Chart:
    """Return a chart with the descriptions of its metrics, and the unit of its first column."""
    first = next(iter(lines.values()))
    table: Literal["metrics", "evaluations"] = "evaluations" if first.startswith(EVALUATIONS) else "metrics"
    known = all_metrics() if table == "metrics" else EVALUATION_METRICS
    columns = {label: column.removeprefix(EVALUATIONS) for label, column in lines.items()}
    names = [column.split("/*")[0] for column in columns.values()]
    texts = dict.fromkeys(known.get(name, known.get(name.rpartition("/")[0], "")) for name in names)
    return Chart(
        id=re.sub(r"[^a-z0-9]+", "-", title.lower()),
        section=section,
        title=title,
        series=columns,
        description=description or " ".join(filter(None, texts)),
        format=unit(first),
        table=table,
        lead=title in LEADS,
        neutral=NEUTRAL.get(title, 0.0),
    )
