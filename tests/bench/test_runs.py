"""Runs of a benchmark that end early."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import runs
from bench.runs import run_until

STEPS = [
    {"step": step, "time/run": 10.0 * step, "time/update": 1.0, "time/wait_for_rollouts": 2.0} for step in (1, 2, 3, 4)
]


class ScriptedProcess:
    """A process of a run that writes one line of metrics and one evaluation whenever it is asked whether it has ended.

    status: exit status without a signal. lines: number of the lines that it writes before it ends.
    """

    def __init__(self, arguments: Sequence[str], run_dir: Path, lines: int, status: int) -> None:
        self.args, self.pid = list(arguments), 0
        self.returncode: int | None = None
        self._run_dir, self._lines, self._status = run_dir, lines, status
        run_dir.mkdir()
        (run_dir / "profile.toml").write_text("", encoding="utf-8")

    def look(self) -> bool:
        """Write the next lines; return whether the process has ended."""
        metrics = self._run_dir / "metrics.jsonl"
        written = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
        if self.returncode is not None or written == self._lines:
            self.returncode = self._status if self.returncode is None else self.returncode
            return True
        evaluations = self._run_dir / "evaluations.jsonl"
        for path, line in ((metrics, STEPS[written]), (evaluations, {"accuracy": 0.2 * written})):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        return False

    def kill(self) -> None:
        """Do nothing: the process has ended."""

    def send_signal(self, number: int) -> None:
        """End as a run that a signal drains."""
        self.returncode = 128 + number


class ScriptedRun(runs.PipelineRun):
    """A run whose process is scripted."""

    def ended(self, *, wait: bool = False) -> bool:
        process: Any = self._process
        while not (ended := process.look()) and wait:
            pass
        return bool(ended)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the process of every run: it writes four lines, and ends with the status of its arguments."""

    def start(command: Sequence[str], **_: object) -> ScriptedProcess:
        return ScriptedProcess(command, Path(command[command.index("--run-dir") + 1]), len(STEPS), int(command[-1]))

    monkeypatch.setattr(runs, "PipelineRun", ScriptedRun)
    monkeypatch.setattr("bench.runs.subprocess.Popen", start)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("seconds", "steps", "status"), [(12.0, 2, 128 + signal.SIGINT), (100.0, 4, 0)], ids=["seconds", "neither"]
)
def test_a_run_is_drained_when_it_has_taken_too_long(seconds: float, steps: int, status: int) -> None:
    """Training begins with the first prompt: 3 seconds before the first update ends, at 10 seconds."""
    record = run_until(["0"], seconds=seconds)
    assert (len(record.metrics), record.status) == (steps, status)


@pytest.mark.usefixtures("scripted")
def test_a_run_that_fails_is_an_error() -> None:
    """With its exit status."""
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_until(["2"], seconds=100.0)
    assert caught.value.returncode == 2
