"""Run directories: resume, cleaning, locks, and files that are never deleted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocols.errors import RunDirectoryError
from training_run.directory.run_directory import open_run


def finished_run(path: Path) -> Path:
    """Create the directory of a finished run."""
    path.mkdir(parents=True)
    for name in ("metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "log.jsonl", "best.json", "lineage.json"):
        (path / name).write_text("")
    (path / "profile.toml").write_text("")
    (path / "superseded" / "001-after-step-000004" / "checkpoints").mkdir(parents=True)
    checkpoint = path / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    (path / "adapters").mkdir()
    (path / "adapters" / "adapters.safetensors").write_text("")
    (path / "atropos" / "env_checkpoints" / "arithmetic_0").mkdir(parents=True)
    for name in ("api-server.log", "arithmetic.log", "arithmetic.log.1", "arithmetic.json"):
        (path / "atropos" / name).write_text("")
    (path / "tokens").mkdir()
    (path / "tokens" / "step-000010.safetensors").write_text("")
    (path / "remote" / "mlx-lm-8080").mkdir(parents=True)
    (path / "remote" / "mlx-lm-8080.log").write_text("")
    return path


def refusal(path: Path, *, resume: bool = False, clean: bool = False) -> str:
    """Return the error message, which must be one line."""
    with pytest.raises(RunDirectoryError) as caught:
        open_run(path, resume=resume, clean=clean)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return str(caught.value)


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_begins_in_an_empty_or_missing_directory(tmp_path: Path, resume: bool) -> None:
    """`--resume` accepts an empty directory, because a run may be killed that early."""
    if resume:
        (tmp_path / "a" / "b").mkdir(parents=True)
    run = open_run(tmp_path / "a" / "b", resume=resume, clean=False)
    assert run.path.is_dir()
    assert not run.resumed
    assert run.metrics == run.path / "metrics.jsonl"
    run.close()


def test_the_run_id_survives_resume_and_clean(tmp_path: Path) -> None:
    """A different directory has a different id."""
    ids = []
    for name, flags in (("a", {}), ("a", {"resume": True}), ("a", {"clean": True}), ("b", {})):
        run = open_run(tmp_path / name, resume=flags.get("resume", False), clean=flags.get("clean", False))
        run.begin()
        run.metrics.touch()
        ids.append(run.run_id)
        run.close()
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_another_run_is_refused_continued_or_deleted(tmp_path: Path) -> None:
    """The message names both flags."""
    path = finished_run(tmp_path / "run")
    message = refusal(path)
    assert "--resume" in message
    assert "--clean" in message
    run = open_run(path, resume=True, clean=False)
    assert run.resumed
    assert run.checkpoints.joinpath("step-000010").is_dir()
    run.close()
    run = open_run(path, resume=False, clean=True)
    assert (path / "metrics.jsonl").exists(), "the old run is deleted before `begin`"
    run.begin()
    assert sorted(entry.name for entry in path.iterdir()) == [".lock", ".run_id"]
    assert not run.resumed
    run.close()
    assert "choose one" in refusal(path, resume=True, clean=True)


HOLDER = """
import sys
from pathlib import Path
from training_run.directory.run_directory import open_run
run = open_run(Path(sys.argv[1]), resume=True, clean=False)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    """The message has the process id; a kill releases the directory."""
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
    for resume, clean in ((False, False), (True, False), (False, True)):
        message = refusal(path, resume=resume, clean=clean)
        assert f"in use by process {holder.pid} (" in message
        assert sys.executable in message
    assert (path / "checkpoints" / "step-000010" / "state.json").exists()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    open_run(path, resume=True, clean=False).close()


FORKING = """
import os, sys, time
from pathlib import Path
from training_run.directory.run_directory import open_run
run = open_run(Path(sys.argv[1]), resume=True, clean=False)
if sys.argv[2] == "inherit":
    from training_run.directory import run_directory
    run_directory._locked.clear()  # as after a fork in C, which Python does not notice
if os.fork() == 0:
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(3600)
run.close()
"""


def stray_child(path: Path, how: str) -> int:
    """Run a process that takes the run directory, forks a child that stays, and ends. Return the child."""
    parent = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(path), how],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.wait() == 0
    parent.stdout.close()
    return child


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """A child that outlives its run does not keep the directory in use."""
    child = stray_child(finished_run(tmp_path / "run"), "fork")
    try:
        open_run(tmp_path / "run", resume=True, clean=False).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_stray_process_that_holds_the_lock_is_named(tmp_path: Path) -> None:
    """The message says how to end it."""
    child = stray_child(finished_run(tmp_path / "run"), "inherit")
    try:
        message = refusal(tmp_path / "run", resume=True)
    finally:
        os.kill(child, signal.SIGKILL)
    assert f"in use by process {child} (" in message
    assert f"kill -9 {child}" in message


def test_a_directory_with_other_files_is_not_changed(tmp_path: Path) -> None:
    """No lock file remains."""
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume, clean in ((False, False), (True, False), (False, True)):
        assert "holds other files but no run" in refusal(tmp_path, resume=resume, clean=clean)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "foreign",
    [
        "notes.txt",
        "checkpoints/mine",
        "adapters/merged.gguf",
        "checkpoints/step-1.txt",
        "atropos/mine.py",
        "superseded/mine.txt",
        "tokens/mine.safetensors",
    ],
)
def test_cleaning_checks_every_file_before_deleting(tmp_path: Path, foreign: str) -> None:
    """With one foreign file at any level, nothing is deleted."""
    path = finished_run(tmp_path / "run")
    (path / foreign).write_text("mine")
    assert foreign in refusal(path, clean=True)
    assert (path / "metrics.jsonl").exists()
    assert (path / "checkpoints" / "step-000010" / "state.json").exists()
    assert (path / foreign).read_text() == "mine"


def test_cleaning_does_not_follow_links(tmp_path: Path) -> None:
    """A linked directory may have other users."""
    elsewhere = finished_run(tmp_path / "elsewhere")
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("")
    (path / "checkpoints").symlink_to(elsewhere / "checkpoints")
    assert "checkpoints" in refusal(path, clean=True)
    assert (elsewhere / "checkpoints" / "step-000010").is_dir()


def test_a_new_run_directory_is_durable_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of each directory that is created is synced. After `--clean`, so is the removal of the earlier run."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    directory = open_run(tmp_path / "a" / "b", resume=False, clean=False)
    directory.begin()
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a", directory.path)} <= set(synced)
    directory.newest_checkpoint.write_text("4")
    directory.close()
    synced.clear()
    directory = open_run(tmp_path / "a" / "b", resume=False, clean=True)
    directory.begin()
    assert synced == [directory.path.stat().st_ino]
    assert not directory.newest_checkpoint.exists()
    directory.close()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    """In the run directory, the checkpoints and the adapters."""
    path = finished_run(tmp_path / "run")
    (path / ".metrics.jsonl.unfinished-12ab34cd").write_text("")
    (path / "checkpoints" / ".step-000020.unfinished-12ab34cd").mkdir()
    (path / "adapters" / ".adapters.safetensors.unfinished-12ab34cd").write_text("")
    run = open_run(path, resume=True, clean=False)
    run.begin()
    run.close()
    assert not list(path.rglob("*unfinished*"))


def test_only_files_that_exist_and_directories_that_hold_something_are_named(tmp_path: Path) -> None:
    """In alphabetical order, directories with a slash."""
    run = open_run(tmp_path, resume=False, clean=False)
    for name in ("remote", "tokens"):
        (tmp_path / name).mkdir()
    for name in ("tokens/step-000010.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_text("")
    assert list(run.written()) == ["metrics.jsonl", "tokens/"]
    run.close()


def test_a_run_that_does_not_begin_leaves_no_trace(tmp_path: Path) -> None:
    """Created directories are removed; existing files are unchanged."""
    open_run(tmp_path / "a" / "b", resume=False, clean=False).close()
    assert not list(tmp_path.iterdir())
    path = finished_run(tmp_path / "run")
    before = sorted(path.rglob("*"))
    open_run(path, resume=False, clean=True).close()
    assert [entry for entry in sorted(path.rglob("*")) if entry.name != ".lock"] == before


def test_a_lock_file_that_is_removed_before_locking_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may remove the lock file between open and lock."""
    lock = tmp_path / ".lock"
    original = fcntl.flock
    removals = iter([lock.unlink])

    def flock(descriptor: int, operation: int) -> None:
        next(removals, lambda: None)()
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    run = open_run(tmp_path, resume=False, clean=False)
    assert next(removals, None) is None
    assert "in use" in refusal(tmp_path)
    run.close()


def test_unusable_paths_are_refused(tmp_path: Path) -> None:
    """A file at the path, or at a parent of the path."""
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(tmp_path / "file")
    assert "cannot be used: Not a directory" in refusal(tmp_path / "file" / "run")


def test_a_read_only_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the run starts. The check is simulated, because root may write anywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in refusal(tmp_path / "run")
