"""The parent watchdog ends a command and all its children when the parent ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from training_run.supervision import parent_watchdog as watchdog

PYTHON = sys.executable
WATCHDOG = [PYTHON, "-I", "-S", watchdog.__file__, "--"]
TIMEOUT_SECONDS = 60.0
"""Limit of every wait; no test depends on its value."""

PARENT_AND_CHILD = """
import os, signal, subprocess, sys, time
obeys = sys.argv[1] == "terminates"
if len(sys.argv) == 2:
    child = subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
if not obeys:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    time.sleep(3600)
"""
"""A process and its child. Standard output ends when both have ended."""


@pytest.fixture
def family(tmp_path: Path) -> str:
    """Return the path of a script that starts a child."""
    path = tmp_path / "family.py"
    path.write_text(PARENT_AND_CHILD, encoding="utf-8")
    return str(path)


class WatchedCommand:
    """A command under the watchdog; this process is the parent."""

    def __init__(self, *command: str, parent: list[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*(parent or []), *WATCHDOG, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pids: list[int] = []

    def line(self) -> str:
        """Return the next line of output."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)
        assert ready, "nothing is printed"
        return self.process.stdout.readline().decode().strip()

    def read_pids(self, count: int) -> None:
        """Read the process IDs of `count` processes."""
        self.pids += [int(self.line()) for _ in range(count)]

    def all_gone(self) -> bool:
        """Wait until every process has closed the output."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_SECONDS)
        return bool(ready) and self.process.stdout.read() == b""

    def close(self) -> None:
        """Kill all processes that are left."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.kill()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()
        self.process.wait()


@pytest.fixture
def started() -> Iterator[list[WatchedCommand]]:
    """Commands that end with the test."""
    found: list[WatchedCommand] = []
    yield found
    for one in found:
        one.close()


@pytest.fixture
def _short_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a copy of the watchdog with a short grace period."""
    code = Path(watchdog.__file__).read_text(encoding="utf-8")
    assert "\nGRACE_SECONDS = 5.0\n" in code
    copy = tmp_path / "watchdog.py"
    copy.write_text(code.replace("\nGRACE_SECONDS = 5.0\n", "\nGRACE_SECONDS = 0.2\n"), encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "WATCHDOG", [PYTHON, "-I", "-S", str(copy), "--"])


@pytest.mark.usefixtures("_short_grace")
@pytest.mark.parametrize(("answer", "signum"), [("terminates", signal.SIGTERM), ("ignores", signal.SIGKILL)])
def test_the_process_group_ends_when_the_parent_closes_standard_input(
    family: str, started: list[WatchedCommand], answer: str, signum: int
) -> None:
    """By SIGTERM, or by SIGKILL after the grace period if it ignores that. The exit status has the signal."""
    one = WatchedCommand(PYTHON, family, answer)
    started.append(one)
    one.read_pids(2)
    assert one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait(TIMEOUT_SECONDS) == 128 + signum
    assert one.all_gone()


def test_all_processes_end_when_the_parent_is_killed(
    family: str, tmp_path: Path, started: list[WatchedCommand]
) -> None:
    """After SIGKILL the kernel closes the parent's end of standard input."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(3600)\n",
        encoding="utf-8",
    )
    one = WatchedCommand(PYTHON, family, "terminates", parent=[PYTHON, str(parent)])
    started.append(one)
    one.read_pids(2)
    one.process.send_signal(signal.SIGKILL)
    assert one.all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_watchdog_ends_all_processes(
    number: signal.Signals, family: str, started: list[WatchedCommand]
) -> None:
    """The watchdog sends SIGTERM to the process group of the command."""
    one = WatchedCommand(PYTHON, family, "terminates")
    started.append(one)
    one.read_pids(2)
    one.process.send_signal(number)
    assert one.process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGTERM
    assert one.all_gone()


def test_children_end_when_the_command_is_killed(family: str, started: list[WatchedCommand]) -> None:
    """A killed command cannot end its children itself."""
    one = WatchedCommand(PYTHON, family, "terminates")
    started.append(one)
    one.read_pids(2)
    groups = {os.getpgid(pid) for pid in one.pids}
    leader = groups.pop()
    assert not groups
    assert leader in one.pids
    os.kill(leader, signal.SIGKILL)
    assert one.process.wait(TIMEOUT_SECONDS) == 128 + signal.SIGKILL
    assert one.all_gone()


@pytest.mark.parametrize("status", [0, 1, 7])
def test_the_exit_status_and_the_output_are_those_of_the_command(status: int, started: list[WatchedCommand]) -> None:
    """The watchdog adds nothing."""
    one = WatchedCommand(PYTHON, "-c", f"print('said'); raise SystemExit({status})")
    started.append(one)
    assert one.line() == "said"
    assert one.process.wait(TIMEOUT_SECONDS) == status


@pytest.mark.parametrize(("command", "status"), [(["/nowhere/program"], 127), (["/"], 126), ([], 2)])
def test_a_command_that_cannot_start_is_an_error(
    command: list[str], status: int, started: list[WatchedCommand]
) -> None:
    """One line, and the exit status that shells use."""
    one = WatchedCommand(*command)
    started.append(one)
    said = one.line()
    assert said.startswith(f"{command[0]}: " if command else "usage: ")
    assert one.process.wait(TIMEOUT_SECONDS) == status


def test_the_command_has_an_empty_standard_input(started: list[WatchedCommand]) -> None:
    """It cannot read the standard input of the watchdog."""
    one = WatchedCommand(PYTHON, "-c", "import sys; print(repr(sys.stdin.read()))")
    started.append(one)
    assert one.line() == "''"
    assert one.process.wait(TIMEOUT_SECONDS) == 0
