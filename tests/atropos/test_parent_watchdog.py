"""The leash: a command and everything it starts end with it, however the parent ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clotho.atropos import parent_watchdog as leash

PYTHON = sys.executable
LEASH = [PYTHON, "-I", "-S", leash.__file__, "--"]
PATIENCE_SECONDS = 60.0
"""Longer than this no test waits; nothing is judged by it."""

FAMILY = """
import os, signal, subprocess, sys, time
obeys = sys.argv[1] == "obedient"
if len(sys.argv) == 2:
    child = subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"])
if not obeys:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    time.sleep(3600)
"""
"""A process and its child; each holds standard output open, which thereby tells when both have gone."""


@pytest.fixture
def family(tmp_path: Path) -> str:
    """The script of two generations."""
    path = tmp_path / "family.py"
    path.write_text(FAMILY, encoding="utf-8")
    return str(path)


class Leashed:
    """A command on a leash whose parent is this process; whoever is left is killed at the end."""

    def __init__(self, *command: str, parent: list[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*(parent or []), *LEASH, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pids: list[int] = []

    def line(self) -> str:
        """The next line, which must come."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_SECONDS)
        assert ready, "nothing is printed"
        return self.process.stdout.readline().decode().strip()

    def meet(self, count: int) -> None:
        """Wait until so many processes have said who they are."""
        self.pids += [int(self.line()) for _ in range(count)]

    def all_gone(self) -> bool:
        """Wait until nobody holds the output open any more."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_SECONDS)
        return bool(ready) and self.process.stdout.read() == b""

    def close(self) -> None:
        """Leave nobody behind."""
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
def started() -> Iterator[list[Leashed]]:
    """What a test starts ends with it."""
    found: list[Leashed] = []
    yield found
    for one in found:
        one.close()


@pytest.mark.parametrize("temper", ["obedient", "stubborn"])
def test_all_generations_end_when_the_parent_lets_go(temper: str, family: str, started: list[Leashed]) -> None:
    """The end of standard input is the parent's death; who ignores SIGTERM is killed after the grace."""
    one = Leashed(PYTHON, family, temper)
    started.append(one)
    one.meet(2)
    assert one.process.stdin is not None
    one.process.stdin.close()
    assert one.process.wait(PATIENCE_SECONDS) == 128 + (signal.SIGTERM if temper == "obedient" else signal.SIGKILL)
    assert one.all_gone()


def test_all_generations_end_when_the_parent_is_killed(family: str, tmp_path: Path, started: list[Leashed]) -> None:
    """SIGKILL leaves the parent no last word: the kernel closes its end, and the grandchild is gone."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(3600)\n",
        encoding="utf-8",
    )
    one = Leashed(PYTHON, family, "obedient", parent=[PYTHON, str(parent)])
    started.append(one)
    one.meet(2)
    one.process.send_signal(signal.SIGKILL)
    assert one.all_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_generations(number: signal.Signals, family: str, started: list[Leashed]) -> None:
    """The leash hears it, and passes SIGTERM on to the group, which is not its own."""
    one = Leashed(PYTHON, family, "obedient")
    started.append(one)
    one.meet(2)
    one.process.send_signal(number)
    assert one.process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    assert one.all_gone()


def test_who_is_left_behind_by_the_command_ends_too(family: str, started: list[Leashed]) -> None:
    """A killed command cannot end its own children."""
    one = Leashed(PYTHON, family, "obedient")
    started.append(one)
    one.meet(2)
    groups = {os.getpgid(pid) for pid in one.pids}
    leader = groups.pop()
    assert not groups
    assert leader in one.pids
    os.kill(leader, signal.SIGKILL)
    assert one.process.wait(PATIENCE_SECONDS) == 128 + signal.SIGKILL
    assert one.all_gone()


@pytest.mark.parametrize("status", [0, 1, 7])
def test_status_and_output_are_the_commands(status: int, started: list[Leashed]) -> None:
    """As if nothing were in between."""
    one = Leashed(PYTHON, "-c", f"print('said'); raise SystemExit({status})")
    started.append(one)
    assert one.line() == "said"
    assert one.process.wait(PATIENCE_SECONDS) == status


@pytest.mark.parametrize(("command", "status"), [(["/nowhere/program"], 127), (["/"], 126), ([], 2)])
def test_what_cannot_be_started_is_said(command: list[str], status: int, started: list[Leashed]) -> None:
    """One line, and the status that shells have for it."""
    one = Leashed(*command)
    started.append(one)
    said = one.line()
    assert said.startswith(f"{command[0]}: " if command else "usage: ")
    assert one.process.wait(PATIENCE_SECONDS) == status


def test_the_command_has_no_hand_on_the_leash(started: list[Leashed]) -> None:
    """It reads an empty standard input, and cannot take what is meant for the leash."""
    one = Leashed(PYTHON, "-c", "import sys; print(repr(sys.stdin.read()))")
    started.append(one)
    assert one.line() == "''"
    assert one.process.wait(PATIENCE_SECONDS) == 0
