"""JSON Lines files: appended to while a run is in progress, and truncated to a step when a run is resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from clotho.storage.atomic_files import replace_file
from protocols.errors import RunDirectoryError

TAIL_BYTES = 1 << 20
"""Size of the blocks that are searched for the last newline."""


class JsonlWriter:
    """Appends records to a JSON Lines file, one line and one write per record. A reader sees complete lines only.

    Opening the file removes an incomplete last line, which a killed process may leave. A write that fails (for example,
    on a full disk) leaves no partial line and raises OSError; later writes are attempted again. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises RunDirectoryError if the file cannot be opened."""
        self.path = path
        self._lock = threading.Lock()
        try:
            # Without O_APPEND, because on Linux O_APPEND makes pwrite ignore its offset.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = self._end_of_last_line()
            os.ftruncate(self._file, self._end)
        except OSError as error:
            raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}") from error

    def append(self, record: Any) -> None:
        """Append one record. Raises OSError if the write fails, ValueError if the file is closed."""
        line = encode(record) + b"\n"
        with self._lock:
            if self._file < 0:
                raise ValueError(f"{self.path} is closed")
            try:
                written = 0
                while written < len(line):
                    written += os.pwrite(self._file, line[written:], self._end + written)
            except OSError:
                os.ftruncate(self._file, self._end)
                raise
            self._end += len(line)

    def close(self) -> None:
        """Close the file. Closing it again has no effect."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _end_of_last_line(self) -> int:
        """Return the offset after the last newline."""
        end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - TAIL_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0


def encode(record: Any) -> bytes:
    """Encode a record as JSON on one line.

    NaN and infinities become null, lone surrogates become U+FFFD, and objects of unknown types become their `str`.
    """
    try:
        return msgspec.json.encode(record, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(record, enc_hook=str)))


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case dict():
            return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
        case _:
            return value


class _Line(Struct):
    """The only key of a line that `truncate_after` reads."""

    step: int | None = None


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines whose `step` is greater than `step`, in one atomic rewrite. A missing file stays missing.

    Lines without a step are kept. An incomplete last line is removed. Raises RunDirectoryError if another line is not
    valid JSON.
    """
    if not path.exists():
        return
    try:
        replace_file(path, _lines_until(path, step))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be rewritten: {error.strerror or error}") from error


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                line_step = msgspec.json.decode(line, type=_Line).step
            except msgspec.MsgspecError as error:
                raise RunDirectoryError(f"{path}:{number}: not valid JSON: {error}") from error
            if line_step is None or line_step <= step:
                yield line
