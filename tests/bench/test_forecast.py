"""The benchmark of the forecast repeats the forecast of the display from the files of a run."""

from __future__ import annotations

from typing import Any

import pytest

from bench.fingerprint import fingerprint
from bench.forecast import ForecastRun, duration, errors, table
from bench.runs import Record


def metrics(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl: every step takes a second."""
    return {
        "step": step, "time/run": 2.0 + step, "time/decode": 0.5, "time/update": 1.0, "time/wait_for_rollouts": 0.0,
        "completion_length/total": 100, "trained_tokens": 50, "groups/trained": 4,
    }  # fmt: skip


def test_equal_steps_are_forecast_without_an_error() -> None:
    """The evaluations of `local-m3` after 20 and 40 steps ran beside the steps, and took no time of their own."""
    evaluations = [{"step": 0, "problems": 512, "time/evaluation": 0.001, "time/run": 2.0}]
    record = Record([metrics(step) for step in range(1, 61)], [], {}, 0.0, evaluations)
    assert duration(record) == 62.0
    assert errors(record) == {done: pytest.approx(0.0, abs=1e-3) for done in (2, 5, 10, 20, 40)}


def test_the_table_has_a_row_per_seed() -> None:
    """And a column per number of steps."""
    run = ForecastRun(seed=3, seconds=30.0, errors={10: 0.05, 20: -0.1}, command="", fingerprint=fingerprint())
    assert "| 3 | 30.0 | - | - | +5% | -10% | - |" in table([run]).splitlines()
