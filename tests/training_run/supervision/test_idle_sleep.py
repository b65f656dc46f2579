"""Idle sleep: `caffeinate` runs as long as the run, on macOS only, and never keeps the display on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from protocols.errors import ProfileError
from training_run.__main__ import main
from training_run.supervision.idle_sleep import no_idle_sleep

DEADLINE_SECONDS = 10.0


@pytest.fixture
def caffeinate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `caffeinate` that writes its process id and its arguments to a file, and waits. Returns the file."""
    path, called = tmp_path / "caffeinate", tmp_path / "called"
    path.write_text(f'#!/bin/sh\necho $$ "$@" > {called}.new\nmv {called}.new {called}\nexec sleep 600\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return called


def read_when_written(path: Path) -> list[str]:
    """Wait for the file, and return its words."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    return path.read_text().split()


def test_macos_does_not_sleep_during_the_run_and_may_turn_off_the_display(caffeinate: Path) -> None:
    """The assertion ends with the block, and with the process: `-w` names it."""
    with no_idle_sleep(enabled=True, system="Darwin"):
        child, *arguments = read_when_written(caffeinate)
        assert arguments == ["-i", "-s", "-w", str(os.getpid())]
        assert os.getsid(int(child)) == int(child)  # Ctrl-C in the terminal is not for it
    assert not psutil.pid_exists(int(child))


@pytest.mark.parametrize(("enabled", "system"), [(False, "Darwin"), (True, "Linux")])
def test_without_the_setting_and_on_other_systems_nothing_is_started(
    enabled: bool, system: str, caffeinate: Path
) -> None:
    """No child process exists within the block."""
    with no_idle_sleep(enabled=enabled, system=system):
        names = {child.name() for child in psutil.Process().children()}
    assert "caffeinate" not in names
    assert not caffeinate.exists()


def test_a_missing_program_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run continues."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with capture_logs() as events, no_idle_sleep(enabled=True, system="Darwin"):
        pass
    assert [(event["event"], event["log_level"]) for event in events] == [("sleep_not_prevented", "warning")]


@pytest.mark.parametrize(
    ("module", "command"),
    [("serve", ["serve", "--profile", "local-m3"]), ("evaluate", ["eval", "--profile", "local-m3", "--limit", "1"])],
)
def test_commands_prevent_sleep_before_they_compute(
    module: str, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve` as long as it serves, and `eval` until its results are there."""
    asked: list[bool] = []

    def ended(*, enabled: bool) -> None:
        asked.append(enabled)
        raise ProfileError("ended here")

    monkeypatch.setattr(f"training_run.commands.{module}.no_idle_sleep", ended)
    assert main(command) == 2
    assert asked == [True]
