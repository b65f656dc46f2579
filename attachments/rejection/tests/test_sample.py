"""The command `sample`: from the rewards of a profile to demonstrations that a run learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.pipeline_process import metrics
from training_run.__main__ import main

FLAGS = ("sample", "--profile", "local-m3", "--limit", "6", "--samples", "2")


def test_the_best_completions_of_a_dataset_are_demonstrations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the columns of their records; a run of the short form learns them without rewards."""
    output = tmp_path / "best.jsonl"
    assert main([*FLAGS, "--keep", "reward >= 1", "--output", str(output)]) == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert f"kept {len(records)} of 18 completions" in capsys.readouterr().out
    assert records
    assert len({one["prompt"] for one in records}) == len(records)
    assert all(one["completion"].endswith(f"<answer>{one['answer']}</answer>") for one in records)
    flags = ("--dataset", str(output), "--steps", "1", "--async", "false", "--eval", "off", "--server", "off")
    assert main(["train", "sft", *flags, "--run-dir", str(tmp_path / "run")]) == 0
    (line,) = metrics(tmp_path / "run")
    assert line["perplexity"] is not None
    assert line["rewards"] == {}


def test_nothing_that_is_kept_is_no_file(tmp_path: Path) -> None:
    """The exit status says so."""
    assert main([*FLAGS, "--keep", "reward > 9", "--output", str(tmp_path / "best.jsonl")]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--output"),
        (("--output", "x.jsonl", "--keep", "rewrd > 1"), "did you mean reward"),
        (("--output", "x.jsonl", "--adapter", "a=b", "--adapter", "c=d"), "one --adapter"),
    ],
)
def test_command_lines_that_cannot_work_are_refused(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded."""
    assert main([*FLAGS, *flags]) == 2
    assert said in capsys.readouterr().err
