"""A measured number and the files of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.measurement import Measurement, ratios, read, write
from tests.bench.measured import measurement


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """And a file that is not there has none."""
    written = [measurement([1.0, 2.0, 9.0], batch=8), measurement([3.0], batch=16, contender="mlx-lm")]
    path = tmp_path / "results" / "decode.jsonl"
    assert read(path) == []
    write(path, written)
    assert read(path) == written
    write(path, written[:1])
    assert read(path) == written[:1]


def test_lines_of_another_form_are_refused(tmp_path: Path) -> None:
    """Older questions have forms of their own."""
    path = tmp_path / "head.jsonl"
    path.write_text('{"vocabulary": 151936}\n')
    with pytest.raises(msgspec.MsgspecError):
        read(path)


def test_one_slow_repeat_does_not_move_the_median() -> None:
    """A median is what a number is called by."""
    assert measurement([10.0, 1.0, 9.0]).median == 9.0


def test_ratios_are_taken_pair_by_pair() -> None:
    """Both were slow at the same time, so ours is twice theirs all along."""
    assert ratios(measurement([10.0, 4.0]), measurement([5.0, 2.0], contender="mlx-lm")) == [2.0, 2.0]


@pytest.mark.parametrize(
    "other",
    [measurement([1.0], batch=8), measurement([1.0, 1.0], batch=16), measurement([1.0, 1.0], metric="other", batch=8)],
    ids=["repeats", "case", "metric"],
)
def test_what_was_not_measured_in_pairs_has_no_ratio(other: Measurement) -> None:
    """Of other cases, metrics, or numbers of repeats."""
    with pytest.raises(ValueError, match="not measured in pairs"):
        ratios(measurement([1.0, 1.0], batch=8), other)
