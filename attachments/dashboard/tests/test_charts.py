"""The charts of the dashboard's overview."""

from __future__ import annotations

from attachments.dashboard.charts import CHARTS, HIDDEN, chart_catalogue
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.metrics import all_metrics

NESTED = (
    "rewards",
    "accuracy_by_type",
    "accuracy_interval",
    "groups/discarded_by_reason",
    "curriculum/problems",
    "pass_at",
    "remote_servers",
    "learner_ranks",
)
"""Metrics with several values, each of which is a column."""

ESTIMATE = ("value", "low", "high")
"""Columns of a mean with its interval, if the metric is a key of evaluations.jsonl."""


def test_every_line_shows_a_metric_that_exists() -> None:
    """A column that no file contains would be a chart that stays empty."""
    for chart in CHARTS:
        known = all_metrics() if chart.table == "metrics" else EVALUATION_METRICS
        for line in chart.series:
            for column in filter(None, (line.column, line.spread, line.low, line.high)):
                estimate, _, part = column.rpartition("/")
                name = estimate if part in ESTIMATE else column
                assert next((one for one in NESTED if name.startswith(f"{one}/")), name) in known, (chart.id, column)


def test_every_chart_has_an_id_of_its_own_and_a_description() -> None:
    """The page finds charts by id, and shows the description as a tooltip."""
    ids = [chart.id for chart in CHARTS]
    assert len(set(ids)) == len(ids)
    assert [chart.id for chart in CHARTS if not chart.description] == []


def test_the_catalogue_is_plain_json_without_default_values() -> None:
    """The page receives it inside the overview."""
    reward = next(chart for chart in chart_catalogue() if chart["id"] == "reward")
    assert list(reward["series"]) == [{"label": "mean", "column": "reward/mean", "spread": "reward/std"}]
    assert "table" not in reward


def test_hidden_columns_have_no_chart() -> None:
    """A column is either on a chart or hidden."""
    assert {line.column for chart in CHARTS for line in chart.series}.isdisjoint(HIDDEN)
