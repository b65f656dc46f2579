"""A display that cannot be written never ends a run."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import SECRET, CompletedRun
from tests.e2e.pipeline_process import REPOSITORY, SMALL, UNEVALUATED, Run, lines, metrics

STEPS = 3
FLAGS = ("--steps", str(STEPS))


def lost_streams(run_dir: Path) -> list[str]:
    """Return the streams that the event log reports as lost."""
    return [event["stream"] for event in lines(run_dir / "log.jsonl") if event["event"] == "output_lost"]


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    """As with `| head -1`. The exit status is that of the training, and the loss is logged once."""
    with Run(tmp_path / "run", "--steps", "1", small=UNEVALUATED) as running:
        running.wait_for("machine")
        assert running.process.stdout is not None
        running.process.stdout.close()
        assert running.process.wait() == 0
    assert len(metrics(tmp_path / "run")) == 1
    assert lost_streams(tmp_path / "run") == ["standard output"]


@pytest.mark.slow
@pytest.mark.needs_linux(reason="/dev/full")
@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        ("> /dev/full", ["standard output"]),
        ("> /dev/full 2>&1", ["standard output", "standard error"]),
        ("<&- >&- 2>&-", ["standard output", "standard error"]),
        ("--monitor.display live > /dev/full", ["standard output"]),
    ],
)
def test_full_or_closed_streams_do_not_end_the_run(tmp_path: Path, redirection: str, lost: list[str]) -> None:
    """All steps are trained, and every lost stream is logged once."""
    command = f'exec "$0" pipeline.py "$@" {redirection}'
    arguments = [sys.executable, "--run-dir", str(tmp_path / "run"), *SMALL, *FLAGS]
    ended = subprocess.run(["sh", "-c", command, *arguments], cwd=REPOSITORY, capture_output=True)
    assert ended.returncode == 0
    assert len(metrics(tmp_path / "run")) == STEPS
    assert lost_streams(tmp_path / "run") == lost


@pytest.mark.slow
def test_a_reader_that_does_not_read_does_not_stop_the_run(tmp_path: Path) -> None:
    """The pipe is full before the run starts, so that its first line blocks."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    command = [sys.executable, "pipeline.py", "--run-dir", str(tmp_path / "run"), *SMALL, *FLAGS]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    os.close(reading)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert len(metrics(tmp_path / "run")) == STEPS


CLOSING_REWARD = """
import sys

def reward(problem, completion):
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.close()
    sys.stdout = sys.stderr = None
    return float(len(completion) % 2)
"""
CLOSING_PROFILE = """
extends = "local-m3"
[[rewards]]
name = "closing_reward:reward"
correct = true
run_in = "thread"
"""


@pytest.mark.slow
def test_a_reward_that_closes_and_replaces_the_streams_does_not_end_the_run(tmp_path: Path) -> None:
    """The display goes on, because it does not use the streams of user code."""
    (tmp_path / "closing_reward.py").write_text(CLOSING_REWARD)
    (tmp_path / "closing.toml").write_text(CLOSING_PROFILE)
    flags = ("--profile", str(tmp_path / "closing.toml"), *FLAGS)
    with Run(tmp_path / "run", *flags, environment={"PYTHONPATH": str(tmp_path)}) as running:
        result = running.finish()
    assert result.status == 0, result
    assert result.accounting.trained > 0
    assert f"step {STEPS}/{STEPS}" in result.out


@pytest.mark.slow
def test_a_terminal_that_closes_drains_the_run(tmp_path: Path) -> None:
    """The terminal sends SIGHUP, and later writes to it fail. The run can be resumed."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "pipeline.py", "--run-dir", str(tmp_path / "run"), *SMALL, "--steps", "5000"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as process:
        os.close(terminal)
        recorded = tmp_path / "run" / "metrics.jsonl"
        while not (recorded.exists() and recorded.stat().st_size):
            assert os.read(controller, 1 << 16)
        os.close(controller)
        process.send_signal(signal.SIGHUP)  # the session has no controlling terminal that would send it
        process.send_signal(signal.SIGHUP)
        assert process.wait() == 0
    log = lines(tmp_path / "run" / "log.jsonl")
    assert "draining" in [event["event"] for event in log]
    assert 0 < len(metrics(tmp_path / "run")) < 5000


def test_a_secret_is_in_no_output_and_no_log(finished: CompletedRun) -> None:
    """The API key is in the resolved profile only, which a resumed run reads."""
    assert SECRET not in finished.result.out + finished.result.err
    files = [path for path in finished.run_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if SECRET in path.read_text("latin-1")] == ["profile.toml"]
