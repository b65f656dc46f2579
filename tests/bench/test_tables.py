"""Markdown tables of measurements."""

from __future__ import annotations

import pytest
from msgspec import structs

from bench.contenders.semantics import meaning
from bench.fingerprint import describe_fingerprint
from bench.tables import closing, number, report, side_by_side, spread
from tests.bench.made_measurements import HERE, measurement

OURS = measurement([2000.0, 2200.0, 2100.0], batch=8, model="6m")
PEER = measurement([1000.0, 1000.0, 1000.0], batch=8, model="6m", contender="mlx-lm")
LARGER = measurement([3000.0], batch=16, model="6m")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (8.0, "8"), (0.12345, "0.123"), (1.5, "1.50"), (99.96, "100"), (123.4, "123"), (12345.6, "12,346")],
)
def test_numbers_have_three_significant_digits(value: float, expected: str) -> None:
    """Further digits are noise."""
    assert number(value) == expected


@pytest.mark.parametrize(
    ("values", "unit", "expected"),
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
def test_the_range_uses_the_unit_of_the_median(values: list[float], unit: str, expected: str) -> None:
    """A single value has no range."""
    assert spread(values, unit) == expected


def test_ratios_are_medians_over_pairs() -> None:
    """Clotho is the first column; missing cells are empty; settings shared by all rows are in the title."""
    assert side_by_side([PEER, OURS, LARGER], "rate").splitlines() == [
        "**rate in tokens/s (higher is better); model 6m**",
        "",
        "| batch | clotho | mlx-lm | clotho / mlx-lm |",
        "|---|---:|---:|---:|",
        "| 8 | 2,100 (2,000 to 2,200) | 1,000 (1,000 to 1,000) | 2.10 (2 to 2.20) |",
        "| 16 | 3,000 |  |  |",
    ]


def test_unpaired_results_have_no_ratio() -> None:
    """Zero values have no ratio either."""
    lone = measurement([1000.0], batch=8, model="6m", contender="mlx-lm")
    nothing = measurement([0.0, 1.0, 1.0], batch=8, model="6m", contender="trl")
    assert side_by_side([OURS, lone, nothing], "rate").splitlines()[-1].endswith("| no pairs | no pairs |")


def test_a_table_without_clotho_has_no_ratios() -> None:
    """The settings of a single case are in its row."""
    assert side_by_side([PEER], "rate", title="Peers").splitlines() == [
        "**Peers**",
        "",
        "| batch | model | mlx-lm |",
        "|---|---|---:|",
        "| 8 | 6m | 1,000 (1,000 to 1,000) |",
    ]


def test_a_unit_in_the_metric_name_is_not_repeated() -> None:
    """Nor is a unit that stands next to each number."""
    rate = measurement([1.0], metric="tokens_per_second", batch=8)
    seconds = measurement([1.0], metric="latency", unit="seconds", better="lower", batch=8)
    assert side_by_side([rate], "tokens_per_second").startswith("**tokens per second (higher is better)**")
    assert side_by_side([seconds], "latency").startswith("**latency (lower is better)**")


def test_an_unknown_metric_is_an_error() -> None:
    """A misspelled name must not remove its table silently."""
    with pytest.raises(ValueError, match="speed"):
        side_by_side([OURS], "speed")


def test_a_report_has_every_metric_and_its_conditions() -> None:
    """Semantics and versions of each contender, then machine, BLAS, commit and command."""
    memory = measurement([1e9], metric="peak_memory", unit="bytes", better="lower", batch=8, model="6m")
    told = report([OURS, PEER, memory], note="Random weights.")
    assert told.index("**rate in tokens/s") < told.index("**peak memory (lower is better)") < told.index("Random")
    *_, ours, peer, _, last = told.splitlines()
    assert (ours, peer) == (
        f"* `clotho`: {meaning('decode', 'clotho')} (mlx 0.32.4)",
        f"* `mlx-lm`: {meaning('decode', 'mlx-lm')} (mlx 0.32.4)",
    )
    where = f"{describe_fingerprint(HERE)}, {HERE.machine.blas}; commit {HERE.commit}."
    assert last == f"{where} `python -m bench decode`"
    assert "peak" not in report([OURS, memory], ["rate"])


def test_contenders_with_the_same_meaning_share_a_line() -> None:
    """A paragraph that is repeated for every contender is not read."""
    same, other = (structs.replace(measurement([1.0], contender=name), semantics="The same.") for name in ("a", "b"))
    lines = closing([same, PEER, other]).splitlines()
    assert [line.partition(":")[0] for line in lines if line.startswith("*")] == ["* `a`, `b`", "* `mlx-lm`"]
