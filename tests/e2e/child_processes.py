"""The child processes of a run, from the process list of the system."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

WATCHDOG = "parent_watchdog.py"
PATIENCE_SECONDS = 60.0
"""Upper limit of a wait. No assertion depends on it."""


def descendants(pid: int) -> dict[int, str]:
    """Return every process below this one with its command line, without the parent watchdogs."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True
    )
    children: dict[int, list[tuple[int, str]]] = {}
    for line in listed.stdout.splitlines():
        own, parent, command = line.split(None, 2)
        children.setdefault(int(parent), []).append((int(own), command))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        for child, command in children.get(left.pop(), []):
            found[child] = command
            left.append(child)
    return {child: command for child, command in found.items() if WATCHDOG not in command}


def find(pid: int, part: str) -> int:
    """Return the one process below `pid` whose command line contains `part`."""
    (found,) = [child for child, command in descendants(pid).items() if part in command]
    return found


def kill(pid: int) -> None:
    """Send SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def wait_until_ended(pids: list[int]) -> bool:
    """Wait until all processes have ended, and return False if one does not."""
    return all(_wait_until_ended(pid) for pid in pids)


def _wait_until_ended(pid: int) -> bool:
    if sys.platform == "darwin":
        queue = select.kqueue()
        ends = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT)
        try:
            return bool(queue.control([ends], 1, PATIENCE_SECONDS))
        except ProcessLookupError:
            return True
        finally:
            queue.close()
    else:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            ready, _, _ = select.select([watched], [], [], PATIENCE_SECONDS)
            return bool(ready)
        finally:
            os.close(watched)
