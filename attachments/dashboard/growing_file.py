"""A file of lines that another process appends to or replaces, read incrementally and in bounded blocks.

Run directories can come from outside, so that a path can be a link, a pipe, or a file of any size.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time."""

MAX_LINE_BYTES = 1 << 25
"""Longer lines are skipped."""

COMPARED_BYTES = 64
"""Bytes before the position that are compared, so that other contents of the same size are noticed."""


class FileLine(NamedTuple):
    """A line without its newline, and its offset in the file."""

    offset: int
    data: bytes


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a descriptor of a regular file. Raises OSError; links at the end of the path are refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_small(path: Path, limit: int) -> bytes | None:
    """Return the contents of a regular file of at most `limit` bytes; None for any other path."""
    try:
        with opened(path) as descriptor:
            data = os.pread(descriptor, limit + 1, 0)
    except (OSError, ValueError):
        return None
    return data if len(data) <= limit else None


def read_part(path: Path, offset: int, size: int) -> bytes | None:
    """Return a part of a regular file; None if the file is shorter or cannot be read."""
    try:
        with opened(path) as descriptor:
            data = os.pread(descriptor, size, offset)
    except (OSError, ValueError):
        return None
    return data if len(data) == size else None


class GrowingFile:
    """The whole lines of a file, each returned once.

    identity: differs after the file was replaced or truncated; all lines are then returned again. skipped: number of
    lines that were longer than `MAX_LINE_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._inode = self._offset = self._replaced = 0
        self._before = b""
        self._in_long_line = False

    @property
    def identity(self) -> str:
        """Identifies the contents up to the position, in other processes too as long as the file only grew."""
        return f"{self._inode:x}-{self._replaced}"

    def read(self) -> tuple[list[FileLine], bool]:
        """Return the next lines, at most about `BLOCK_BYTES`, and whether there can be more now.

        A missing or unreadable file has no lines.
        """
        try:
            with opened(self.path) as descriptor:
                return self._read(descriptor)
        except (OSError, ValueError):
            if self._inode:
                self._begin(0)
            return [], False

    def _read(self, descriptor: int) -> tuple[list[FileLine], bool]:
        status = os.fstat(descriptor)
        start = self._offset - len(self._before)
        is_same = status.st_ino == self._inode and status.st_size >= self._offset
        if not is_same or os.pread(descriptor, len(self._before), start) != self._before:
            self._begin(status.st_ino)
        if self._in_long_line:
            self._skip_hole(descriptor, status.st_size)
        if status.st_size == self._offset:
            return [], False
        block = os.pread(descriptor, BLOCK_BYTES, self._offset)
        end = block.rfind(b"\n") + 1
        if not end and len(block) == BLOCK_BYTES and not self._in_long_line:
            block = os.pread(descriptor, MAX_LINE_BYTES, self._offset)
            end = block.rfind(b"\n") + 1
            self._in_long_line = not end and len(block) == MAX_LINE_BYTES
        if not end:
            if self._in_long_line:  # the rest of the line is dropped when its end is found
                self._move(block)
            return [], self._in_long_line and bool(block)
        lines = list(self._lines(block[:end]))
        if self._in_long_line:
            self.skipped += 1
            self._in_long_line = False
            lines = lines[1:]
        self._move(block[:end])
        return lines, True

    def _skip_hole(self, descriptor: int, size: int) -> None:
        """Continue a long line after a part of the file that no block of the disk has: it has no end of a line."""
        try:
            data = os.lseek(descriptor, self._offset, os.SEEK_DATA)
        except OSError as error:  # ENXIO: the hole is the rest of the file
            data = size if error.errno == errno.ENXIO else self._offset
        if data - self._offset >= COMPARED_BYTES:
            self._offset, self._before = min(data, size), bytes(COMPARED_BYTES)

    def _lines(self, block: bytes) -> Iterator[FileLine]:
        offset = self._offset
        for data in block.split(b"\n")[:-1]:
            yield FileLine(offset, data)
            offset += len(data) + 1

    def _move(self, block: bytes) -> None:
        self._offset += len(block)
        self._before = (self._before + block[-COMPARED_BYTES:])[-COMPARED_BYTES:]

    def _begin(self, inode: int) -> None:
        """Start again at the beginning of new contents."""
        self._replaced += bool(self._offset)
        self._inode, self._offset, self._before = inode, 0, b""
        self._in_long_line, self.skipped = False, 0
