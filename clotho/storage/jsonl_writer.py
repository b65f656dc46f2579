"""A growing file of JSON lines, each of which is whole or not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

from protocols.errors import RunDirectoryError

TAIL_BYTES = 1 << 20
"""How far from the end the last line is looked for; longer last lines are not extended."""


class LineWriter:
    """Appends records to a file, one line and one write each; a reader sees whole lines at any moment.

    A line that a killed process left torn is removed at opening. A write that fails (a full disk) leaves no part of
    the line behind and raises OSError; later ones are tried again. Any thread may write.
    """

    def __init__(self, path: Path) -> None:
        """Open, or create, the file. Raises RunDirectoryError where that is impossible."""
        self.path = path
        self._lock = threading.Lock()
        try:
            # Not O_APPEND: with it, Linux appends even what is written at a position.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = self._whole_lines()
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}") from error

    def append(self, record: Any) -> None:
        """Write one record: a struct or plain values. Raises OSError; ValueError once closed."""
        line = encode(record) + b"\n"
        with self._lock:
            self._put(line, self._end, keep=b"")

    def extend_last(self, fields: dict[str, Any]) -> bool:
        """Add keys to the last record, in place and in one write; False if there is none, or it has one of them."""
        with self._lock:
            last = self._last()
            if last is None or not fields or last.keys() & fields.keys():
                return False
            more = encode(fields)[1:]
            self._put(b"," + more + b"\n", self._end - 2, keep=b"}\n")
            return True

    def last(self) -> dict[str, Any] | None:
        """The last record; None if there is none, or it is too long to be looked at."""
        with self._lock:
            return self._last()

    def close(self) -> None:
        """Close the file; the second time does nothing."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _put(self, data: bytes, position: int, *, keep: bytes) -> None:
        """Write at a position; if that fails, put back what was there and cut the rest off."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], position + written)
        except OSError:
            os.pwrite(self._file, keep, position)
            os.ftruncate(self._file, position + len(keep))
            raise
        self._end = position + len(data)

    def _whole_lines(self) -> int:
        """Where the last whole line ends."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - TAIL_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _last(self) -> dict[str, Any] | None:
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        start = max(0, self._end - TAIL_BYTES)
        tail = os.pread(self._file, self._end - start, start)
        begin = tail.rfind(b"\n", 0, max(0, len(tail) - 1)) + 1
        if not tail or (begin == 0 and start > 0):
            return None
        return msgspec.json.decode(tail[begin:], type=dict[str, Any])


def encode(record: Any) -> bytes:
    """JSON on one line. Numbers that are not finite become null, half characters U+FFFD, the unknown its `str`."""
    try:
        return msgspec.json.encode(record, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_scrubbed(msgspec.to_builtins(record, enc_hook=str)))


def _scrubbed(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_scrubbed(key): _scrubbed(item) for key, item in value.items()}
        case list() | tuple():
            return [_scrubbed(item) for item in value]
        case _:
            return value
