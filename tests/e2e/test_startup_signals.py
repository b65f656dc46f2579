"""SIGINT, SIGTERM and SIGHUP before training end the process silently and leave no half-made run directory."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.pipeline_process import Run, RunResult, run

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
STEPS = ("--steps", "2")
slow = pytest.mark.slow


def handles_signals(running: Run) -> bool:
    """Whether the process has installed its handlers. Python itself does not handle SIGTERM."""
    status = Path(f"/proc/{running.process.pid}/status").read_text(encoding="ascii")
    caught = re.search(r"SigCgt:\s*([0-9a-f]+)", status)
    return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def interrupt(running: Run, number: signal.Signals, condition: Callable[[], bool]) -> RunResult:
    """Send the signal when the condition is true, and wait for the end."""
    while not condition():
        assert running.process.poll() is None, running.finish()
        threading.Event().wait(0.001)
    running.send(number)
    return running.finish()


@pytest.mark.needs_linux(reason="/proc has the handled signals of a process")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_first_imports_ends_the_process_silently(tmp_path: Path, number: signal.Signals) -> None:
    """From the first line of the program on. The exit status is that of a shell."""
    with Run(tmp_path / "run", *STEPS) as running:
        result = interrupt(running, number, lambda: handles_signals(running))
    assert (result.status, result.out, result.err) == (128 + number, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, *(pytest.param(one, marks=slow) for one in SIGNALS[::2])])
def test_a_signal_before_the_run_begins_removes_the_empty_run_directory(tmp_path: Path, number: signal.Signals) -> None:
    """The lock file is created first; nothing else is written until all inputs have been checked."""
    run_dir = tmp_path / "new" / "run"
    with Run(run_dir, *STEPS) as running:
        result = interrupt(running, number, (run_dir / ".lock").exists)
    assert (result.status, result.err) == (128 + number, "")
    assert result.out in ("", "loading  profiles/embedded ...\n")
    assert not list(tmp_path.iterdir())


MODULE = "tests.e2e.hanging_code"
REWARD = f'[{{name = "{MODULE}:reward", correct = true, run_in = "%s"}}]'
ACTOR = f'[{{name = "tap", factory = "{MODULE}:Tap", mode = "tap", at = "reports"}}]'


@pytest.mark.parametrize(
    ("part", "flags", "phase"),
    [
        pytest.param("warmup", ("--learner.objective", f"{MODULE}:objective"), "phase=warmup step"),
        pytest.param("import", ("--actors", ACTOR), "phase=custom actors", marks=slow),
        pytest.param("import", ("--rewards", REWARD % "thread"), "phase=custom actors", marks=slow),
        pytest.param("import", ("--rewards", REWARD % "process"), "phase=worker processes", marks=slow),
    ],
)
def test_a_start_that_hangs_is_reported_and_ends_with_a_signal(
    tmp_path: Path, part: str, flags: tuple[str, ...], phase: str
) -> None:
    """Code of the user hangs. A line names the phase of the start. The first SIGTERM ends the process."""
    settings = (*STEPS, "--monitor.watchdog-seconds", "0.2", *flags)
    with Run(tmp_path / "run", *settings, environment={"CLOTHO_TEST_HANG": part}) as running:
        line = running.wait_for(phase)
        running.send(signal.SIGTERM)
        result = running.finish()
    assert "start_takes_long" in line
    assert (result.status, result.err) == (128 + signal.SIGTERM, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_signal_after_the_run_has_begun_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    """A drain, if the actors have started already."""
    with Run(tmp_path / "run", *STEPS) as running:
        result = interrupt(running, signal.SIGTERM, (tmp_path / "run" / "profile.toml").exists)
    assert result.status in (128 + signal.SIGTERM, 0)
    assert result.err == ""
    resumed = run(tmp_path / "run", *STEPS, "--resume")
    assert resumed.status == 0, resumed


@pytest.mark.needs_linux(reason="/proc has the handled signals of a process")
@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_any_moment_of_the_start_is_silent(tmp_path: Path, number: signal.Signals) -> None:
    """At 12 moments of the first three seconds after the handlers were installed. A late signal drains the run."""
    for moment in range(12):
        run_dir = tmp_path / str(moment)
        with Run(run_dir, *STEPS) as running:
            while not handles_signals(running):
                assert running.process.poll() is None
            threading.Event().wait(0.25 * moment)
            result = interrupt(running, number, lambda: True)
        assert result.status in (128 + number, 0), (moment, result)
        assert result.err == "", moment
        begun = (run_dir / ".run_id").exists()
        assert begun or not run_dir.exists(), moment
