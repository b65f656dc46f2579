"""Child processes that end with this process, whatever way it ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT

import anyio
from anyio.abc import Process

from training_run.supervision.parent_watchdog import GRACE_SECONDS

WATCHDOG = (sys.executable, "-I", "-S", str(Path(__file__).with_name("parent_watchdog.py")), "--")


async def start_child(
    argv: Sequence[str], *, variables: Mapping[str, str] | None = None, output: int = PIPE
) -> Process:
    """Start a command under the parent watchdog, in a session of its own, with one stream for both outputs.

    variables: the environment; None means that of this process. output: a file descriptor instead of a pipe.
    """
    return await anyio.open_process(
        [*WATCHDOG, *argv], stdin=PIPE, stdout=output, stderr=STDOUT, env=variables, start_new_session=True
    )


async def end_child(process: Process) -> None:
    """Let the parent watchdog end the process group; kill the watchdog if that takes too long."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(GRACE_SECONDS + 2.0):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()
