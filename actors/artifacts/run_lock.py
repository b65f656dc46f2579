"""One living process per run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from protocols.errors import RunDirectoryError

LOCK = ".lock"


class RunLock:
    """An advisory lock on `directory`/.lock, held until `release` or the end of the process, however it ends."""

    def __init__(self, directory: Path) -> None:
        """Take the lock. Raises `RunDirectoryError`, naming the process, while another one holds it."""
        self._descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise RunDirectoryError(
                f"run directory {directory} is in use by process {holder}: wait for it to end, or use another --run-dir"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the next process in; a second call does nothing."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1
