"""`python -m bench --compare BEFORE AFTER`: what is a regression, and what is no comparison."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from bench.compare import Change, main
from bench.measurement import Measurement, write
from tests.bench.measured import measurement


def compare(path: Path, before: list[Measurement], after: list[Measurement], *flags: str) -> int:
    """The status of comparing two files."""
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
def test_a_change_is_larger_than_the_tolerance_and_than_the_spread(
    before: list[float], after: list[float], verdict: str
) -> None:
    """Between medians, against the larger distance from lowest to highest."""
    assert Change(measurement(before), measurement(after)).verdict(0.1) == verdict


def test_what_is_better_when_lower_becomes_worse_by_growing() -> None:
    """Seconds and bytes."""
    slow, fast = (measurement([value], unit="seconds", better="lower") for value in (2.0, 1.0))
    assert Change(fast, slow).verdict(0.1) == "regression"
    assert Change(slow, fast).verdict(0.1) == "improvement"


def test_a_regression_is_shown_and_is_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else was measured before and after stands beside it."""
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
        "1 of 2 worse by more than 10% and than the spread",
    ]
    assert shown.err == ""
    assert compare(tmp_path, before, after, "--tolerance", "0.5") == 0
    assert compare(tmp_path, after, before) == 0


def test_another_machine_or_version_is_said_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison is made all the same; and what only one side has is counted."""
    before = [measurement([1.0], versions={"mlx": "0.31"}), measurement([1.0], batch=8)]
    assert compare(tmp_path, before, [measurement([1.0], versions={"mlx": "0.32"})]) == 0
    assert capsys.readouterr().err == (
        "bench: the two were not measured alike: mlx of clotho 0.31 before, 0.32 after\n"
        "bench: 1 measurements are in one of the two only\n"
    )


def test_of_directories_files_of_another_form_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with a note; the others are compared."""
    for side in ("before", "after"):
        write(tmp_path / side / "decode.jsonl", [measurement([1.0])])
        (tmp_path / side / "head.jsonl").write_text('{"vocabulary": 151936}\n')
    assert main([str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    assert capsys.readouterr().err.count("head.jsonl does not have measurements") == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no "),
        ("{}\n", "does not have measurements"),
        ("", "the two have no measurement in common"),
        ("other case", "the two have no measurement in common"),
        ("other meaning", "decode: rate has changed its meaning"),
    ],
)
def test_what_cannot_be_compared_is_said_on_one_line(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a status of its own."""
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    write(before, [measurement([1.0])])
    others = {"other case": measurement([1.0], batch=8), "other meaning": measurement([1.0], unit="seconds")}
    if content in others:
        write(after, [others[content]])
    elif content is not None:
        after.write_text(content)
    assert main([str(before), str(after)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_comparing_is_asked_for_with_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or as a question of its own."""
    write(tmp_path / "decode.jsonl", [measurement([1.0])])
    for asked in ("--compare", "compare"):
        monkeypatch.setattr(sys, "argv", ["bench", asked, str(tmp_path), str(tmp_path)])
        assert bench() == 0
        assert "0 of 1 worse" in capsys.readouterr().out
