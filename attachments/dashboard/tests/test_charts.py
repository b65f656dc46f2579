"""The charts of the dashboard's overview."""

from __future__ import annotations

import msgspec
import pytest

from attachments.dashboard.charts import HIDDEN, charts, unit
from training_run.records.evaluation_history import EVALUATION_METRICS
from training_run.records.metrics import ATTACHED_METRICS, all_metrics

NESTED = ("rewards", "accuracy_by_type", "groups/discarded_by_reason", "pass_at", "remote_servers", "learner_ranks")
"""Metrics with several values, each of which is a column."""


def test_every_line_shows_a_metric_that_exists() -> None:
    """A column that no file contains would be a chart that stays empty."""
    for chart in charts():
        known = all_metrics() if chart.table == "metrics" else EVALUATION_METRICS
        for column in chart.series.values():
            name = column.removesuffix("/value")
            assert next((one for one in NESTED if name.startswith(f"{one}/")), name) in known, (chart.id, column)


def test_every_metric_of_an_attachment_has_a_chart() -> None:
    """Its registration is enough: one chart for each key of a table, and one for the other metrics of a unit."""
    columns = {column.split("/*")[0] for chart in charts() for column in chart.series.values()}
    assert set(ATTACHED_METRICS()) <= columns
    machine = {chart.title: list(chart.series.values()) for chart in charts() if chart.section == "Machine"}
    assert machine["Machine, percent"] == ["resources/cpu_share", "resources/gpu_share"]


def test_every_chart_has_an_id_of_its_own_and_a_description() -> None:
    """The page finds charts by id, and shows the description as a tooltip."""
    ids = [chart.id for chart in charts()]
    assert len(set(ids)) == len(ids)
    assert [chart.id for chart in charts() if not chart.description] == []


def test_the_catalogue_is_plain_json_without_default_values() -> None:
    """The page receives it with the settings of the run."""
    reward = next(chart for chart in msgspec.to_builtins(charts()) if chart["id"] == "reward")
    assert reward["series"] == {"mean": "reward/mean"}
    assert "table" not in reward


def test_hidden_columns_have_no_chart() -> None:
    """A column is either on a chart or hidden."""
    assert {column for chart in charts() for column in chart.series.values()}.isdisjoint(HIDDEN)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        ("loss", "number"), ("time/update", "seconds"), ("remote_servers/*/push_seconds", "seconds"),
        ("tokens_per_second", "number"), ("peak_memory_bytes", "bytes"), ("completion_ess", "percent"),
        ("truncated_fraction", "percent"), ("reward/mean", "number"),
    ],
)  # fmt: skip
def test_the_unit_of_a_column_follows_from_its_name(column: str, expected: str) -> None:
    """As metrics are named everywhere."""
    assert unit(column) == expected
