"""Measurements and results files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.measurement import Measurement, ratios, read, write
from tests.bench.made_measurements import measurement


def test_written_results_are_read_back(tmp_path: Path) -> None:
    """A missing file has no results."""
    written = [measurement([1.0, 2.0, 9.0], batch=8), measurement([3.0], batch=16, contender="mlx-lm")]
    path = tmp_path / "results" / "decode.jsonl"
    assert read(path) == []
    write(path, written)
    assert read(path) == written
    write(path, written[:1])
    assert read(path) == written[:1]


def test_lines_of_another_format_are_refused(tmp_path: Path) -> None:
    """Some benchmarks have their own formats."""
    path = tmp_path / "head.jsonl"
    path.write_text('{"vocabulary": 151936}\n')
    with pytest.raises(msgspec.MsgspecError):
        read(path)


def test_one_slow_repeat_does_not_change_the_median() -> None:
    """Tables show medians."""
    assert measurement([10.0, 1.0, 9.0]).median == 9.0


def test_ratios_are_taken_pair_by_pair() -> None:
    """If both contenders are slow at the same time, the ratio is unchanged."""
    assert ratios(measurement([10.0, 4.0]), measurement([5.0, 2.0], contender="mlx-lm")) == [2.0, 2.0]


@pytest.mark.parametrize(
    "other",
    [measurement([1.0], batch=8), measurement([1.0, 1.0], batch=16), measurement([1.0, 1.0], metric="other", batch=8)],
    ids=["repeats", "case", "metric"],
)
def test_unpaired_measurements_have_no_ratio(other: Measurement) -> None:
    """Other case, metric or number of repeats."""
    with pytest.raises(ValueError, match="not measured in pairs"):
        ratios(measurement([1.0, 1.0], batch=8), other)
