"""Restarts: a run whose process a signal ended is continued, and loses no group."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from attachments.restarts import attachment, supervision
from attachments.restarts.supervision import CONNECTION, LEAST_TURN_MS, TURN_MS, shorter, with_turns
from clotho.storage.atomic_files import UNFINISHED
from protocols.errors import ProfileError
from tests.e2e.pipeline_process import BATCH, PRINTED_STEPS, UNEVALUATED, Run, RunResult, assert_recorded, metrics
from tests.training_run.built_context import tiny_profile
from training_run.profile.load import load_profile

TELLING = f'extends = "local-m3"\n{PRINTED_STEPS}'

CHILD = f"""
import json, os, signal, socket, sys
from pathlib import Path
lives = Path(sys.argv[1])
lives.write_text(lives.read_text() + " ".join(sys.argv[2:]) + "\\n")
connection = socket.socket(fileno=int(os.environ["{CONNECTION}"]))
connection.sendall(json.dumps({{"turn_ms": 100.0, "run_directory": str(lives.parent)}}).encode() + b"\\n")
END
"""
"""A process that records its arguments, tells that it can be resumed, and ends."""


def lives(path: Path, end: str, *, restarts: int) -> tuple[int, list[str], str]:
    """Supervise a child that ends in a way; return the status, the arguments of each life, and what was said."""
    record = path / "lives"
    record.write_text("")
    command = [sys.executable, "-S", "-E", "-c", CHILD.replace("END", end), str(record)]
    code = f"from attachments.restarts.supervision import supervise; import sys; sys.exit(supervise({command!r}, "
    code += f"['--clean', '--steps', '8'], {restarts}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, record.read_text().splitlines(), done.stderr


def test_a_run_is_continued_with_shorter_turns_after_each_sigabrt(tmp_path: Path) -> None:
    """As often as the setting says; then the supervisor ends as its process did."""
    status, arguments, said = lives(tmp_path, "os.abort()", restarts=2)
    assert status == 128 + signal.SIGABRT
    shortened = "--steps 8 --resume --learner.max-turn-ms 50"
    assert arguments == ["--clean --steps 8", shortened, shortened]
    assert "SIGABRT" in said
    assert said.count("learner.max_turn_ms = 50") == 2


def test_turns_stay_as_they_are_after_another_signal(tmp_path: Path) -> None:
    """Linux kills a process that uses too much memory."""
    _, arguments, _ = lives(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", restarts=1)
    assert arguments == ["--clean --steps 8", "--steps 8 --resume"]


@pytest.mark.parametrize(("end", "status"), [("sys.exit(1)", 1), ("pass", 0), ("os.kill(os.getpid(), 15)", 143)])
def test_a_run_that_fails_ends_or_is_terminated_is_not_continued(tmp_path: Path, end: str, status: int) -> None:
    """A failure would repeat itself."""
    found, arguments, _ = lives(tmp_path, end, restarts=3)
    assert (found, len(arguments)) == (status, 1)


def test_turns_are_halved_down_to_a_least_length() -> None:
    """Turns without a limit get the default. A turn that is shorter already stays."""
    assert [shorter(ms) for ms in (0.0, 250.0, 40.0, 10.0)] == [TURN_MS, 125.0, LEAST_TURN_MS, 10.0]


def test_the_length_of_turns_replaces_that_of_the_command_line() -> None:
    """However it is written."""
    for given in (["--learner.max-turn-ms", "200"], ["--learner.max_turn_ms=200"], []):
        assert with_turns([*given, "--steps", "3"], 62.5) == ["--steps", "3", "--learner.max-turn-ms", "62.5"]


def test_a_process_has_at_most_one_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None without the setting, and none below a supervisor."""
    begun: list[int] = []
    monkeypatch.setattr(supervision, "become_supervisor", begun.append)
    monkeypatch.delenv(CONNECTION, raising=False)
    attachment.supervise(tiny_profile(tmp_path))
    assert begun == []
    profile = load_profile("local-m3", {"restarts": 3})
    attachment.supervise(profile)
    monkeypatch.setenv(CONNECTION, "3")
    attachment.supervise(profile)
    assert begun == [3]


def test_ranks_have_restarts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names their setting."""
    profile = load_profile("local-m3", {"restarts": 3})
    attachment.check(profile)
    monkeypatch.setenv("MLX_RANK", "0")
    with pytest.raises(ProfileError, match=r"distributed\.restarts"):
        attachment.check(profile)


def process_of_run(running: Run, before: int = 0) -> int:
    """Wait for the process of the run that is not `before`, and return its identifier."""
    found: list[int] = []

    def has_started() -> bool:
        found[:] = [child.pid for child in psutil.Process(running.process.pid).children() if child.pid != before]
        return bool(found)

    running.wait_until(has_started)
    return found[0]


def supervised(run_dir: Path, *, steps: int, restarts: int) -> Run:
    """Start a run with a supervisor."""
    profile = run_dir.parent / "telling.toml"
    profile.write_text(TELLING)
    flags = ("--profile", str(profile), "--restarts", str(restarts), "--steps", str(steps))
    return Run(run_dir, *flags, "--checkpoint.interval", "2", small=UNEVALUATED)


def aborted(run_dir: Path, *moments: Callable[[Run], None], steps: int, restarts: int = 3) -> RunResult:
    """Run, and abort the process of the run at these moments of its lives: each returns when it has come."""
    child = 0
    with supervised(run_dir, steps=steps, restarts=restarts) as running:
        for moment in moments:
            child = process_of_run(running, child)
            moment(running)
            os.kill(child, signal.SIGABRT)
        return running.finish()


def check(run_dir: Path, result: RunResult, *, aborts: int, steps: int) -> None:
    """Check the status, the restarts, and the accounting over all lives."""
    assert result.status == 0, result
    assert result.err.count("was ended by SIGABRT; restart") == aborts
    assert (result.accounting.prompted, result.accounting.carried_over) == (steps * BATCH, 0)
    assert_recorded(run_dir, result.accounting, steps=steps)


def after_steps(running: Run, *, steps: int) -> None:
    """Wait until so many steps have been reported."""
    for _ in range(steps):
        running.wait_for("step reported")


def while_loading(running: Run) -> None:
    """Wait for the line that comes before the model is loaded."""
    running.wait_for("loading")


def while_a_checkpoint_is_written(running: Run, *, run_dir: Path) -> None:
    """Wait until a checkpoint appears that is not complete."""
    running.wait_until(lambda: any((run_dir / "checkpoints").glob(f".step-*{UNFINISHED}*")))


def test_an_aborted_run_is_continued_and_the_signals_of_its_supervisor_drain_it(tmp_path: Path) -> None:
    """The process that was started is the supervisor. A drained run is not continued."""
    run_dir = tmp_path / "run"
    with supervised(run_dir, steps=500, restarts=3) as running:
        child = process_of_run(running)
        running.wait_for("step reported")
        os.kill(child, signal.SIGABRT)
        running.wait_for("step reported")
        running.send(signal.SIGTERM)
        result = running.finish()
    assert result.status == 0
    assert result.err.count("was ended by SIGABRT; restart 1 of 3") == 1
    assert "restart 2" not in result.err
    assert_recorded(run_dir, result.accounting, steps=len(metrics(run_dir)))
    assert "max_turn_ms = 125.0" in (run_dir / "profile.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_runs_that_are_aborted_at_ten_moments_complete(tmp_path: Path, seed: int) -> None:
    """During the start, after some steps, and while a checkpoint is written: 3, 3, 2 and 2 moments."""
    run_dir, choose = tmp_path / "run", random.Random(seed)
    kinds: list[Callable[[Run], None]] = [
        while_loading,
        partial(after_steps, steps=choose.randint(0, 2)),
        partial(while_a_checkpoint_is_written, run_dir=run_dir),
    ]
    moments = kinds if seed < 2 else kinds[1:]
    choose.shuffle(moments)
    check(run_dir, aborted(run_dir, *moments, steps=12), aborts=len(moments), steps=12)
