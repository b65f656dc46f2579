"""JSON Lines files: appended to while a run is in progress, repaired and truncated to a step when a run is resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from clotho.storage.atomic_files import replace_file, sync, sync_directory
from protocols.errors import RunDirectoryError, disk_errors_as, escape_invisible
from training_run.directory.integer_set import IntegerSet

TAIL_BYTES = 1 << 20
"""Size of the blocks that are searched for the last newline."""


class JsonlWriter:
    """Appends records to a JSON Lines file, one line and one write per record. A reader sees complete lines only.

    Opening the file removes an incomplete last line, which a killed process may leave. A write that fails (for example,
    on a full disk) leaves no partial line and raises OSError; later writes are attempted again. Thread-safe.
    """

    def __init__(self, path: Path, *, terminal_safe: bool = False) -> None:
        """Open or create the file. Raises RunDirectoryError if the file cannot be opened.

        terminal_safe: write control and format characters as JSON escapes, so that a terminal can show the file.
        """
        self.path, self._terminal_safe = path, terminal_safe
        self._lock = threading.Lock()
        with disk_errors_as(RunDirectoryError, f"{path} cannot be written"):
            # Without O_APPEND, because on Linux O_APPEND makes pwrite ignore its offset.
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._end = self._end_of_last_line()
            sync_directory(path.parent)
            os.ftruncate(self._file, self._end)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._end

    def append(self, record: Any) -> None:
        """Append one record. Raises OSError if the write fails, ValueError if the file is closed."""
        line = encode(record, terminal_safe=self._terminal_safe) + b"\n"
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


class StepRecord(Struct, frozen=True, kw_only=True):
    """The key that the lines of all histories have."""

    step: int


class Record(Protocol):
    """The keys of a line that a reader needs; a struct with any other keys."""

    @property
    def step(self) -> int:
        """The step that the line belongs to."""


T = TypeVar("T", bound=Record)


class Scan(Struct, kw_only=True):
    """What a file holds up to a step. A long history is not held in memory.

    exists: whether there is a file. recorded: the numbers of its records; repeated: those that more than one has.
    later: number of records after the step. padding: number of NUL bytes, which a power failure leaves where data did
    not reach the disk. invalid: the numbers of the lines that are not records, counted from 1; invalid_bytes: their
    size. unterminated: the last line is complete but lacks its newline.
    """

    path: Path
    exists: bool = True
    recorded: IntegerSet = msgspec.field(default_factory=IntegerSet)
    repeated: IntegerSet = msgspec.field(default_factory=IntegerSet)
    later: int = 0
    padding: int = 0
    invalid: IntegerSet = msgspec.field(default_factory=IntegerSet)
    invalid_bytes: int = 0
    unterminated: bool = False

    @property
    def changed(self) -> bool:
        """Whether `rewrite` changes the file."""
        return bool(self.later or self.padding or self.invalid or self.unterminated)


def scan(path: Path, step: int, record: type[T], number: Callable[[T], int] = lambda found: found.step) -> Scan:
    """Read a file and change nothing. record: the keys that every line must have. number: returns that of a record.

    Raises RunDirectoryError if the path is not a regular file, or if the file cannot be read.
    """
    if not path.exists():
        return Scan(path=path, exists=False)
    if not path.is_file():
        raise RunDirectoryError(f"{path} is not a regular file: move it away")
    found = Scan(path=path)
    with disk_errors_as(RunDirectoryError, f"{path} cannot be read"):
        for line_number, raw in enumerate(_raw_lines(path), start=1):
            found.padding += raw.count(0)
            for line in _parts(raw):
                decoded = _decode(line, record)
                if decoded is None:
                    found.invalid.add(line_number)
                    found.invalid_bytes += len(line)
                elif decoded.step > step:
                    found.later += 1
                else:
                    if not found.recorded.add(number(decoded)):
                        found.repeated.add(number(decoded))
                    found.unterminated = not raw.endswith(b"\n")
    return found


def line_of_step(path: Path, step: int) -> bytes:
    """The last line of a step, without its end; empty if the end of the file has none, or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return b""
    return next((line for line in reversed(lines) if (found := _decode(line, StepRecord)) and found.step == step), b"")


def rewrite(found: Scan, step: int, record: type[T]) -> None:
    """Reduce a scanned file to its records up to the step, in one atomic replacement. A missing file stays missing.

    record: as for `scan`. Raises RunDirectoryError if the file cannot be written.
    """
    if found.changed:
        with disk_errors_as(RunDirectoryError, f"{found.path} cannot be rewritten"):
            replace_file(found.path, _lines_until(found.path, step, record))


def copy_until(source: Path, destination: Path, step: int, record: type[T]) -> None:
    """Write the records of `source` up to a step to `destination`, atomically. Without `source`, nothing is written.

    record: as for `scan`. Raises RunDirectoryError if the disk refuses.
    """
    if source.is_file():
        with disk_errors_as(RunDirectoryError, f"{source} cannot be copied to {destination}"):
            replace_file(destination, _lines_until(source, step, record))


def sync_files(paths: Iterable[Path]) -> None:
    """Sync the contents of those files that exist to disk. Raises OSError if the disk refuses."""
    for path in paths:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                sync(descriptor)
            finally:
                os.close(descriptor)


def _raw_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _lines_until(path: Path, step: int, record: type[T]) -> Iterator[bytes]:
    for line in chain.from_iterable(map(_parts, _raw_lines(path))):
        found = _decode(line, record)
        if found is not None and found.step <= step:
            yield line + b"\n"


def _parts(raw: bytes) -> list[bytes]:
    """Split a line at NUL bytes: what a power failure lost can lie between two lines, together with their newline."""
    return [part for part in map(bytes.strip, raw.split(b"\0")) if part]


def _decode(line: bytes, record: type[T]) -> T | None:
    """Return the record of a line, or None if the line is not one."""
    try:
        line.decode()  # keys that `record` lacks are not decoded otherwise
        return msgspec.json.decode(line, type=record)
    except (ValueError, RecursionError):
        return None


def encode(record: Any, *, terminal_safe: bool = False) -> bytes:
    """Encode a record as JSON on one line.

    NaN and infinities become null, lone surrogates become U+FFFD, and objects of unknown types become their `str`.
    terminal_safe: the characters that `protocols.errors.visible` escapes become JSON escapes.
    """
    try:
        line = msgspec.json.encode(record, enc_hook=str)
    except UnicodeEncodeError:
        line = msgspec.json.encode(_without_surrogates(msgspec.to_builtins(record, enc_hook=str)))
    return escape_invisible(line.decode(), _json_escape).encode() if terminal_safe else line


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


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
