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
        self._path = directory / LOCK
        self._descriptor = self._open()
        while not self._is_in_place():  # its last holder removed it between our opening and our locking it
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self, *, remove: bool = False) -> None:
        """Let the next process in; a second call does nothing. remove: leave no file behind either."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink() if remove else os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        """Open and lock the file, whichever it is by now."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise RunDirectoryError(
                f"run directory {self._path.parent} is in use by process {holder}: "
                "wait for it to end, or use another --run-dir"
            ) from error
        return descriptor

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False
