"""`python -m bench --compare BEFORE AFTER`: regressions and inputs that cannot be compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from bench.compare import Change, main
from bench.measurement import Measurement, write
from tests.bench.made_measurements import measurement


def compare(path: Path, before: list[Measurement], after: list[Measurement], *flags: str) -> int:
    """Exit status of comparing two files."""
    write(path / "before.jsonl", before)
    write(path / "after.jsonl", after)
    return main([str(path / "before.jsonl"), str(path / "after.jsonl"), *flags])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([100.0, 101.0, 102.0], [80.0, 81.0, 82.0], "regression"),
        ([80.0, 81.0, 82.0], [100.0, 101.0, 102.0], "improvement"),
        ([100.0, 101.0, 102.0], [95.0, 96.0, 97.0], ""),  # within the tolerance
        ([100.0, 101.0, 140.0], [70.0, 71.0, 72.0], ""),  # within the spread of the first
        ([100.0, 101.0, 102.0], [50.0, 71.0, 90.0], ""),  # and of the second
        ([100.0], [80.0], "regression"),
        ([0.0], [0.0], ""),
        ([0.0], [-1.0], "regression"),
    ],
)
def test_a_change_exceeds_the_tolerance_and_the_spread(before: list[float], after: list[float], verdict: str) -> None:
    """Medians are compared; the wider spread counts."""
    assert Change(measurement(before), measurement(after)).verdict(0.1) == verdict


def test_a_lower_is_better_metric_regresses_when_it_grows() -> None:
    """For example seconds and bytes."""
    slow, fast = (measurement([value], unit="seconds", better="lower") for value in (2.0, 1.0))
    assert Change(fast, slow).verdict(0.1) == "regression"
    assert Change(slow, fast).verdict(0.1) == "improvement"


def test_a_regression_sets_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table lists all pairs."""
    before = [measurement([100.0], batch=8), measurement([100.0], batch=16)]
    after = [measurement([70.0], batch=8), measurement([100.0], batch=16)]
    assert compare(tmp_path, before, after) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "| question | case | contender | metric | before | after | change |  |",
        "|---|---|---|---|---:|---:|---:|---:|",
        "| decode | batch 8 | clotho | rate | 100 | 70 | -30.0% | regression |",
        "| decode | batch 16 | clotho | rate | 100 | 100 | +0.0% |  |",
        "",
        "1 of 2 are worse by more than 10% and by more than the spread",
    ]
    assert shown.err == ""
    assert compare(tmp_path, before, after, "--tolerance", "0.5") == 0
    assert compare(tmp_path, after, before) == 0


def test_different_versions_are_reported_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison continues, and unpaired measurements are counted."""
    before = [measurement([1.0], versions={"mlx": "0.31"}), measurement([1.0], batch=8)]
    assert compare(tmp_path, before, [measurement([1.0], versions={"mlx": "0.32"})]) == 0
    assert capsys.readouterr().err == (
        "bench: the measurement conditions differ: mlx of clotho 0.31 before, 0.32 after\n"
        "bench: 1 measurements are in only one of the two sets\n"
    )


def test_files_of_another_format_in_a_directory_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each skipped file is reported; the others are compared."""
    for side in ("before", "after"):
        write(tmp_path / side / "decode.jsonl", [measurement([1.0])])
        (tmp_path / side / "head.jsonl").write_text('{"vocabulary": 151936}\n')
    assert main([str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert capsys.readouterr().err.count("head.jsonl is not a file of measurements") == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "does not exist"),
        ("{}\n", "is not a file of measurements"),
        ("", "the two sets have no measurement in common"),
        ("other case", "the two sets have no measurement in common"),
        ("other meaning", "decode: rate has another unit"),
    ],
)
def test_bad_input_is_one_line_with_status_2(
    content: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing files, other formats, and nothing in common."""
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    write(before, [measurement([1.0])])
    others = {"other case": measurement([1.0], batch=8), "other meaning": measurement([1.0], unit="seconds")}
    if content in others:
        write(after, [others[content]])
    elif content is not None:
        after.write_text(content)
    assert main([str(before), str(after)]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_compare_works_as_flag_and_as_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--compare` and `compare` do the same."""
    write(tmp_path / "decode.jsonl", [measurement([1.0])])
    for asked in ("--compare", "compare"):
        monkeypatch.setattr(sys, "argv", ["bench", asked, str(tmp_path), str(tmp_path)])
        assert bench() == 0
        assert "0 of 1 are worse" in capsys.readouterr().out
