"""Keeps a command on a leash: `PYTHON parent_watchdog.py -- COMMAND...` ends it, and all it started, when our parent has gone.

It stands alone: the standard library of Python 3.9, on Linux and macOS. The parent holds the other end of standard
input and need not write to it: that end closes when the parent dies, be it by SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS = 5.0
"""From SIGTERM to SIGKILL."""
LOOK_SECONDS = 0.02
USAGE, CANNOT_EXECUTE, NOT_FOUND = 2, 126, 127


def main(arguments: list[str]) -> int:
    """Run the command to its end; its exit status, or, as shells have it, 128 + the signal that ended it."""
    if len(arguments) < 2 or arguments[0] != "--":
        sys.stderr.write("usage: parent_watchdog.py -- COMMAND...\n")
        return USAGE
    woken = _wake_on_signals()
    try:
        child = subprocess.Popen(arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"{arguments[1]}: {error.strerror or error}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE
    _wait(child, woken)
    _end_group(child)
    status = child.wait()
    return status if status >= 0 else 128 - status


def _wake_on_signals() -> int:
    """From here on every signal that matters is a byte to read; the end to read them from."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return woken


def _wait(child: subprocess.Popen[bytes], woken: int) -> None:
    """Return when the command has ended, or when it should."""
    leash = sys.stdin.fileno()
    while child.poll() is None:
        ready, _, _ = select.select([leash, woken], [], [])
        if leash in ready and not _read(leash):
            return
        if woken in ready and set(_read(woken)) - {signal.SIGCHLD}:
            return


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except ConnectionError:  # standard input may be a socket
        return b""


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the command's process group, and SIGKILL to what of it is left after the grace."""
    deadline = time.monotonic() + GRACE_SECONDS
    alive = _send(child, signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        alive = _send(child, 0)
    if alive:
        _send(child, signal.SIGKILL)


def _send(child: subprocess.Popen[bytes], number: int) -> bool:
    """Send to the whole group; whether anybody in it lives. A command that has ended is taken note of."""
    child.poll()
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group in which only the dead, not yet buried, are left
        return child.poll() is None
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
