"""Users name checkpoints as RUN, RUN@STEP or the directory of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocols.errors import CheckpointError, ClothoError, RunDirectoryError
from tests.training_run.directory.made_checkpoints import snapshot
from training_run.directory.checkpoints import write_checkpoint
from training_run.directory.run_paths import find_checkpoint, run_of, run_profile, split_step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run directory with the checkpoints of the steps 4 and 8."""
    for step in (4, 8):
        write_checkpoint(tmp_path / "run" / "checkpoints", snapshot(step), keep_last=9)
    return tmp_path / "run"


def test_a_checkpoint_is_named_by_its_run_and_step_or_by_its_directory(run: Path) -> None:
    """Without a step, the newest one is meant."""
    older, newer = (run / "checkpoints" / name for name in ("step-000004", "step-000008"))
    assert find_checkpoint(str(run), "--fork") == newer
    assert find_checkpoint(f"{run}@4", "--fork") == older
    assert find_checkpoint(str(older), "--fork") == older
    assert (run_of(older), run_of(run)) == (run, None)
    assert run_profile(f"{run}@4") == run_profile(str(older)) == run / "profile.toml"


def test_an_existing_path_with_an_at_sign_is_not_split(tmp_path: Path) -> None:
    """Only digits after the last sign are a step."""
    (tmp_path / "run@4").mkdir()
    assert split_step(f"{tmp_path}/run@4") == (tmp_path / "run@4", None)
    assert split_step("run@x") == (Path("run@x"), None)
    assert split_step("a@b@12") == (Path("a@b"), 12)


@pytest.mark.parametrize(
    ("suffix", "kind", "hint"),
    [
        ("@5", CheckpointError, "4, 8"),
        ("x", RunDirectoryError, "did you mean"),
        ("/checkpoints", RunDirectoryError, ""),
    ],
)
def test_a_checkpoint_that_does_not_exist_is_refused(
    run: Path, suffix: str, kind: type[ClothoError], hint: str
) -> None:
    """With the steps that exist, or the nearest run."""
    with pytest.raises(kind) as caught:
        find_checkpoint(f"{run}{suffix}", "--fork")
    assert str(caught.value).startswith("--fork")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)
