"""Run directories: taken over on request, never by accident, and nobody's files deleted."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clotho.storage.run_directory import open_run
from protocols.errors import RunDirectoryError


def finished_run(path: Path) -> Path:
    """A directory as a run leaves it."""
    path.mkdir(parents=True)
    for name in ("profile.toml", "metrics.jsonl", "rollouts.jsonl", "log.jsonl"):
        (path / name).write_text("")
    checkpoint = path / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (path / "adapters").mkdir()
    (path / "adapters" / "adapters.safetensors").write_text("")
    (path / "atropos" / "env_checkpoints" / "arithmetic_0").mkdir(parents=True)
    for name in ("api-server.log", "arithmetic.log", "arithmetic.log.1", "arithmetic.json"):
        (path / "atropos" / name).write_text("")
    return path


def refusal(path: Path, *, resume: bool = False, clean: bool = False) -> str:
    """The one line that says why this directory is refused."""
    with pytest.raises(RunDirectoryError) as caught:
        open_run(path, resume=resume, clean=clean)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return str(caught.value)


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_directory_is_made(tmp_path: Path, resume: bool) -> None:
    """Parents too; to resume where there is nothing yet is to begin: a run may be killed that early."""
    run = open_run(tmp_path / "a" / "b", resume=resume, clean=False)
    assert run.path.is_dir()
    assert not run.resumed
    assert run.metrics == run.path / "metrics.jsonl"
    run.close()


def test_another_run_is_refused_continued_or_deleted(tmp_path: Path) -> None:
    """The refusal names both ways out."""
    path = finished_run(tmp_path / "run")
    message = refusal(path)
    assert "--resume" in message
    assert "--clean" in message
    run = open_run(path, resume=True, clean=False)
    assert run.resumed
    assert run.checkpoints.joinpath("step-000010").is_dir()
    run.close()
    run = open_run(path, resume=False, clean=True)
    assert (path / "metrics.jsonl").exists(), "deleted before the new run begins"
    run.begin()
    assert [entry.name for entry in path.iterdir()] == [".lock"]
    assert not run.resumed
    run.close()
    assert "give one of them" in refusal(path, resume=True, clean=True)


HOLDER = """
import sys
from pathlib import Path
from clotho.storage.run_directory import open_run
run = open_run(Path(sys.argv[1]), resume=True, clean=False)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("resume", "clean"), [(False, False), (True, False), (False, True)])
def test_a_directory_in_use_is_refused_whatever_is_asked(tmp_path: Path, resume: bool, clean: bool) -> None:
    """The living process is named; once it is killed the directory is free."""
    path = finished_run(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    assert f"in use by process {holder.pid}" in refusal(path, resume=resume, clean=clean)
    assert (path / "checkpoints" / "step-000010" / "state.json").exists()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    open_run(path, resume=True, clean=False).close()


def test_a_directory_of_other_files_is_never_touched(tmp_path: Path) -> None:
    """Not even a lock file is left in it."""
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume, clean in ((False, False), (True, False), (False, True)):
        assert "holds other files and no run" in refusal(tmp_path, resume=resume, clean=clean)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "stranger", ["notes.txt", "checkpoints/mine", "adapters/merged.gguf", "checkpoints/step-1.txt", "atropos/mine.py"]
)
def test_cleaning_refuses_before_deleting_anything(tmp_path: Path, stranger: str) -> None:
    """One foreign file in a run directory, at any level a run uses, and all of it stays."""
    path = finished_run(tmp_path / "run")
    (path / stranger).write_text("mine")
    assert stranger in refusal(path, clean=True)
    assert (path / "metrics.jsonl").exists()
    assert (path / "checkpoints" / "step-000010" / "state.json").exists()
    assert (path / stranger).read_text() == "mine"


def test_cleaning_does_not_follow_links(tmp_path: Path) -> None:
    """A linked directory of checkpoints may be shared with something else."""
    elsewhere = finished_run(tmp_path / "elsewhere")
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    (path / "checkpoints").symlink_to(elsewhere / "checkpoints")
    assert "checkpoints" in refusal(path, clean=True)
    assert (elsewhere / "checkpoints" / "step-000010").is_dir()


def test_what_a_killed_run_left_half_done_is_removed(tmp_path: Path) -> None:
    """In the directory itself, among checkpoints and adapters."""
    path = finished_run(tmp_path / "run")
    (path / ".metrics.jsonl.unfinished-12ab34cd").write_text("")
    (path / "checkpoints" / ".step-000020.unfinished-12ab34cd").mkdir()
    (path / "adapters" / ".adapters.safetensors.unfinished-12ab34cd").write_text("")
    run = open_run(path, resume=True, clean=False)
    run.begin()
    run.close()
    assert not list(path.rglob("*unfinished*"))


def test_a_run_that_never_begins_leaves_no_trace(tmp_path: Path) -> None:
    """What was made is removed, parents too; what was there before stays as it was."""
    open_run(tmp_path / "a" / "b", resume=False, clean=False).close()
    assert not list(tmp_path.iterdir())
    path = finished_run(tmp_path / "run")
    before = sorted(path.rglob("*"))
    open_run(path, resume=False, clean=True).close()
    assert [entry for entry in sorted(path.rglob("*")) if entry.name != ".lock"] == before


def test_a_lock_removed_between_opening_and_locking_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that never began removes its lock; whoever had just opened it must not hold a file that nobody finds."""
    lock = tmp_path / ".lock"
    original = fcntl.flock
    leaving = iter([lock.unlink])

    def flock(descriptor: int, operation: int) -> None:
        next(leaving, lambda: None)()
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    run = open_run(tmp_path, resume=False, clean=False)
    assert next(leaving, None) is None
    assert "in use" in refusal(tmp_path)
    run.close()


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """A file in the way, above or in place of the directory."""
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    assert "cannot be used: Not a directory" in refusal(tmp_path / "file" / "run")


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run begins, not at its first checkpoint. The check is simulated: root may write anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in refusal(tmp_path / "run")
