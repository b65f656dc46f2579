"""Idle sleep of the system while a command computes: macOS sleeps while nobody uses keyboard and mouse."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import structlog

log = structlog.get_logger(actor="pipeline")

END_SECONDS = 2.0
"""Time that `caffeinate` gets to end."""


@contextmanager
def no_idle_sleep(*, enabled: bool, system: str = "") -> Iterator[None]:
    """Within the block, macOS does not sleep by itself: `caffeinate -i -s -w PID` holds the assertion.

    enabled: `monitor.prevent_sleep`. system: as `platform.system()`, which is the default. The display may still sleep,
    because GPU work of a long duration is stopped while the display is on. The assertion also ends with this process,
    however it ends. Other systems are not changed.
    """
    if not enabled or (system or platform.system()) != "Darwin":
        yield
        return
    child = None
    try:
        child = subprocess.Popen(
            ["caffeinate", "-i", "-s", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal drains the run, which takes a while
        )
    except OSError as error:
        log.warning(
            "sleep_not_prevented", error=error.strerror or str(error), hint="run it as caffeinate -i -s COMMAND"
        )
    try:
        yield
    finally:
        if child is not None:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
