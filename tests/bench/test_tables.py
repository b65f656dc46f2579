"""How measurements are written in Markdown."""

from __future__ import annotations

import pytest

from bench.fingerprint import describe_fingerprint
from bench.tables import number, report, side_by_side, spread
from tests.bench.measured import HERE, measurement

OURS = measurement([2000.0, 2200.0, 2100.0], batch=8, model="6m")
PEER = measurement([1000.0, 1000.0, 1000.0], batch=8, model="6m", contender="mlx-lm")
LARGER = measurement([3000.0], batch=16, model="6m")


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (8.0, "8"), (0.12345, "0.123"), (1.5, "1.50"), (99.96, "100"), (123.4, "123"), (12345.6, "12,346")],
)
def test_a_number_has_three_digits_that_count(value: float, said: str) -> None:
    """More are never more than noise."""
    assert number(value) == said


@pytest.mark.parametrize(
    ("values", "unit", "said"),
    [
        ([11704.3], "tokens/s", "11,704"),
        ([0.00123, 0.0012, 0.0013], "seconds", "1.23 ms (1.20 to 1.30)"),
        ([0.0000456], "seconds", "45.6 µs"),
        ([2.5e-8], "seconds", "0.0250 µs"),
        ([12.5, 12.25], "seconds", "12.4 s (12.2 to 12.5)"),
        ([1.5e9, 9e8], "bytes", "1.20 GB (0.900 to 1.50)"),
        ([2.5e6], "bytes", "2.50 MB"),
        ([0.0, 0.0], "bytes", "0 B (0 to 0)"),
    ],
)
def test_lowest_and_highest_are_written_in_the_unit_of_the_median(values: list[float], unit: str, said: str) -> None:
    """A single value has no spread."""
    assert spread(values, unit) == said


def test_contenders_stand_side_by_side_and_ratios_are_those_of_pairs() -> None:
    """We come first; a cell stays empty where nobody measured; what all rows share stands in the title."""
    assert side_by_side([PEER, OURS, LARGER], "rate").splitlines() == [
        "**rate in tokens/s (higher is better); model 6m**",
        "",
        "| batch | clotho | mlx-lm | clotho / mlx-lm |",
        "|---|---:|---:|---:|",
        "| 8 | 2,100 (2,000 to 2,200) | 1,000 (1,000 to 1,000) | 2.10 (2 to 2.20) |",
        "| 16 | 3,000 |  |  |",
    ]


def test_what_was_not_measured_in_pairs_has_no_ratio() -> None:
    """Nor has what is nothing."""
    lone = measurement([1000.0], batch=8, model="6m", contender="mlx-lm")
    nothing = measurement([0.0, 1.0, 1.0], batch=8, model="6m", contender="trl")
    assert side_by_side([OURS, lone, nothing], "rate").splitlines()[-1].endswith("| no pairs | no pairs |")


def test_a_table_can_be_without_us_and_its_only_case_stands_in_the_row() -> None:
    """Then there is nothing to divide by."""
    assert side_by_side([PEER], "rate", title="Peers").splitlines() == [
        "**Peers**",
        "",
        "| batch | model | mlx-lm |",
        "|---|---|---:|",
        "| 8 | 6m | 1,000 (1,000 to 1,000) |",
    ]


def test_a_metric_whose_name_says_its_unit_has_no_other() -> None:
    """Nor has one whose unit stands with every number."""
    rate = measurement([1.0], metric="tokens_per_second", batch=8)
    seconds = measurement([1.0], metric="latency", unit="seconds", better="lower", batch=8)
    assert side_by_side([rate], "tokens_per_second").startswith("**tokens per second (higher is better)**")
    assert side_by_side([seconds], "latency").startswith("**latency (lower is better)**")


def test_a_metric_that_nobody_measured_is_a_mistake() -> None:
    """A misspelt one would leave its table out."""
    with pytest.raises(ValueError, match="nobody measured speed"):
        side_by_side([OURS], "speed")


def test_a_report_has_every_metric_and_says_how_it_was_measured() -> None:
    """What each contender's numbers mean and run on; then machine, BLAS, commit and command."""
    memory = measurement([1e9], metric="peak_memory", unit="bytes", better="lower", batch=8, model="6m")
    told = report([OURS, PEER, memory], said="Random weights.")
    assert told.index("**rate in tokens/s") < told.index("**peak memory (lower is better)") < told.index("Random")
    *_, ours, peer, _, last = told.splitlines()
    assert (ours, peer) == (
        "* `clotho`: What clotho does. (mlx 0.32.4)",
        "* `mlx-lm`: What mlx-lm does. (mlx 0.32.4)",
    )
    where = f"{describe_fingerprint(HERE)}, {HERE.machine.blas}; commit {HERE.commit}."
    assert last == f"{where} `python -m bench decode`"
    assert "peak" not in report([OURS, memory], ["rate"])
