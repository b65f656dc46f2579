"""The supervisor of a run of one process.

The process that was started becomes the supervisor, and the run is its child. So signals to the process that a user or
a service manager knows reach the run, and the supervisor holds no memory but that of an interpreter.

Metal ends a process with SIGABRT, from a thread of its own, if its work delays the display or takes too long. After
that, turns of updates get shorter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from training_run.supervision.restarting import (
    PASSED_ON,
    PassedSignals,
    SupervisedProcess,
    ending,
    exit_status,
    program,
    resumed,
    say,
    was_killed,
    without,
)

CONNECTION = "CLOTHO_RESTARTS"
"""Environment variable with the file descriptor of the connection to the supervisor."""

TURN_MS = 250.0
"""Longest turn of an update after the first SIGABRT, in ms, if turns had no limit."""
LEAST_TURN_MS = 30.0
"""Turns do not get shorter than this: each costs the time to build and to launch its work."""

TURN_KEY = "learner.max_turn_ms"

BOOT = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from attachments.restarts.supervision import supervise; "
    "sys.exit(supervise(given['command'], given['arguments'], given['restarts']))"
)


def become_supervisor(restarts: int) -> None:
    """Replace the program of this process by that of a supervisor, which starts it again with the same arguments."""
    arguments = sys.argv[1:]
    given = {"path": sys.path, "command": program(arguments), "arguments": arguments, "restarts": restarts}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(sys.executable, [sys.executable, "-c", BOOT, json.dumps(given)])


def supervise(command: Sequence[str], arguments: Sequence[str], restarts: int) -> int:
    """Run a command until it ends, and continue its run when a signal has ended it; return its exit status.

    restarts: how often. A run that fails is not started again, nor one whose supervisor has received a signal.
    """
    signals = PassedSignals(PASSED_ON)
    for number in range(restarts + 1):
        process = SupervisedProcess([*command, *arguments], variable=CONNECTION)
        signals.process = process
        if signals.received:  # before there was a process
            process.send(signals.received)
        status = process.wait()
        if signals.received or not was_killed(status):
            break
        what = f"the process of the run {ending(status)}"
        if number == restarts:
            say(f"{what}; it is not started again after {restarts} restarts (restarts)")
            break
        facts, changed = process.facts, ""
        if facts.run_directory and has_files(facts.run_directory):
            arguments = resumed(arguments, facts.run_directory)
        if status == -signal.SIGABRT:
            turn_ms = shorter(facts.turn_ms)
            arguments = with_turns(arguments, turn_ms)
            changed = f", with {TURN_KEY} = {turn_ms:g}"
        say(f"{what}; restart {number + 1} of {restarts}{changed}")
    return exit_status(status, signals.received)


def has_files(run_directory: str) -> bool:
    """Whether anything of a run has been written."""
    with suppress(OSError):
        return any(not name.startswith(".") for name in os.listdir(run_directory))
    return False


def shorter(turn_ms: float) -> float:
    """Return the longest turn after a SIGABRT, in ms. turn_ms: before; 0: turns had no limit."""
    return max(min(turn_ms, LEAST_TURN_MS), turn_ms / 2) if turn_ms else TURN_MS


def with_turns(arguments: Sequence[str], turn_ms: float) -> list[str]:
    """Return the arguments with this longest turn."""
    kept, _ = without(arguments, TURN_KEY)
    return [*kept, f"--{TURN_KEY.replace('_', '-')}", f"{turn_ms:g}"]
