"""Parent watchdog: `PYTHON parent_watchdog.py -- COMMAND...` ends COMMAND's process group when our parent ends.

The script is standalone: it uses only the standard library of Python 3.9, on Linux and macOS. The parent holds the
other end of standard input and never writes to it. That end closes when the parent dies, also by SIGKILL.

On Linux, the watchdog reaps the orphans of the command. The first process of a container often does not; the process
group would then exist until the end of the grace period.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

GRACE_SECONDS = 5.0
"""Time from SIGTERM to SIGKILL."""
POLL_SECONDS = 0.02
PR_SET_CHILD_SUBREAPER = 36
USAGE, CANNOT_EXECUTE, NOT_FOUND = 2, 126, 127


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status, or 128 + the signal number, as shells do."""
    if len(arguments) < 2 or arguments[0] != "--":
        sys.stderr.write("usage: parent_watchdog.py -- COMMAND...\n")
        return USAGE
    wakeup = _wake_on_signals()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{arguments[1]}: {error.strerror or error}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    _wait(child, wakeup)
    _end_group(child)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wake_on_signals() -> int:
    """Return the read end of a pipe that receives one byte per signal."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return read_end


def _wait(child: subprocess.Popen[bytes], wakeup: int) -> None:
    """Return when the command has ended, the parent has ended, or a signal has arrived."""
    parent = sys.stdin.fileno()
    while child.poll() is None:
        ready, _, _ = select.select([parent, wakeup], [], [])
        if parent in ready and not _read(parent):
            return
        if wakeup in ready and set(_read(wakeup)) - {signal.SIGCHLD}:
            return


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except ConnectionError:  # standard input may be a socket
        return b""


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the command's process group, and SIGKILL to the remaining processes after the grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    alive = _send(child, signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        alive = _send(child, 0)
    if alive:
        _send(child, signal.SIGKILL)


def _send(child: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the process group; return True if a process of the group is alive. Reaps ended processes."""
    child.poll()
    _reap_orphans(child)
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS raises this for a group that contains only zombies
        return child.poll() is None
    return True


def _reap_orphans(child: subprocess.Popen[bytes]) -> None:
    """On Linux, reap the ended processes of the command's process group, except the command, which `Popen` reaps."""
    if sys.platform == "linux":
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_PGID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid != child.pid:
                    os.waitpid(ended.si_pid, 0)
                elif child.poll() is None:
                    return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
