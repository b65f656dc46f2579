"""Atomic files and directories: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from msgspec import Struct

UNFINISHED = ".unfinished-"
"""Part of the temporary name of everything that is being written. A killed process leaves entries with this name."""

REPLACED = ".replaced-"
"""Part of the name of a directory that is being replaced, between the two renames."""

COPY_BYTES = 1 << 20
"""Number of bytes that are copied at a time."""

F_BARRIERFSYNC = 85
"""Command of `fcntl` on macOS that Python does not name: `fsync`, and a barrier in the write cache of the drive."""

UNKNOWN_COMMAND = frozenset({errno.ENOTSUP, errno.EINVAL, errno.ENOTTY})
"""Errors of a file system of macOS that knows neither F_BARRIERFSYNC nor F_FULLFSYNC, such as a network volume."""


class FileDigest(Struct, frozen=True, kw_only=True):
    """Size and SHA-256 digest (hexadecimal) of a file."""

    name: str
    size: int
    sha256: str


def sync(descriptor: int, *, flush: bool = False) -> None:
    """Sync an open file or directory to disk. Raises OSError if the disk refuses.

    On macOS, `fsync` leaves data in the write cache of the drive, which a power failure loses in any order. A barrier
    keeps the order: what is synced later is never there without what was synced before. flush: also write the cache
    (F_FULLFSYNC), with everything that was synced before, which stalls the whole drive for tens of milliseconds. A file
    system that knows neither is synced by `fsync` alone.
    """
    os.fsync(descriptor)
    if sys.platform == "darwin":
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC if flush else F_BARRIERFSYNC)
        except OSError as error:
            if error.errno not in UNKNOWN_COMMAND:
                raise


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, durably: the entry of each new directory is synced to disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_directory(directory.parent)


def write_file(path: Path, chunks: Iterable[bytes | memoryview], *, mode: int = 0o666) -> FileDigest:
    """Write a new file and sync it to disk. Not atomic by itself: `path` must be in an unfinished directory."""
    digest = hashlib.sha256()
    size = 0
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        sync(file.fileno())
    return FileDigest(name=path.name, size=size, sha256=digest.hexdigest())


def copy_file(source: Path, destination: Path) -> FileDigest:
    """Copy a file to a new file and sync it to disk, as `write_file` does."""
    with source.open("rb") as file:
        return write_file(destination, iter(lambda: file.read(COPY_BYTES), b""))


def sync_file(path: Path) -> FileDigest:
    """Sync a file that a library wrote to disk, and return its digest."""
    with path.open("rb") as file:
        sync(file.fileno())
        return _digest(path.name, file)


def digest_file(path: Path) -> FileDigest:
    """Read a file and return its digest."""
    with path.open("rb") as file:
        return _digest(path.name, file)


def replace_file(path: Path, chunks: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Replace `path` atomically: readers see the old or the new file. mode: permissions, reduced by the umask."""
    temporary = _temporary_name(path, UNFINISHED)
    try:
        write_file(temporary, chunks, mode=mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def replaced_from_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; at the end of the block, the file `path.name` in it replaces `path` atomically.

    For libraries that write files by name and leave temporary files beside them. Nothing changes after an error.
    """
    temporary = _temporary_name(path, UNFINISHED)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary / path.name, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory; at the end of the block, the directory becomes `path`, complete.

    An existing directory is renamed first and removed last; `remove_leftovers` undoes a kill between the two. Nothing
    changes after an error. At the end, the write cache of the drive is written too.
    """
    temporary = _temporary_name(path, UNFINISHED)
    temporary.mkdir()
    previous = _temporary_name(path, REPLACED)
    try:
        yield temporary
        sync_directory(temporary)
        if path.exists():
            path.rename(previous)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if previous.exists():
            previous.rename(path)
        raise
    sync_directory(path.parent, flush=True)
    if previous.exists():
        shutil.rmtree(previous)


def remove_leftovers(directory: Path) -> None:
    """Remove or restore what a killed process left in `directory`, if it exists. The caller holds the run's lock."""
    if not directory.is_dir():
        return
    for entry in list(directory.iterdir()):
        if not is_leftover(entry):
            continue
        name, _, _ = entry.name.removeprefix(".").partition(REPLACED)
        if REPLACED in entry.name and not (directory / name).exists():
            entry.rename(directory / name)
        elif entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def is_leftover(path: Path) -> bool:
    """Return whether a path has the name of an unfinished or replaced entry."""
    return path.name.startswith(".") and (UNFINISHED in path.name or REPLACED in path.name)


def sync_directory(directory: Path, *, flush: bool = False) -> None:
    """Sync the entries of a directory to disk, as `sync`. Without it, a power failure may undo a rename."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        sync(descriptor, flush=flush)
    finally:
        os.close(descriptor)


def _digest(name: str, file: BufferedReader) -> FileDigest:
    digest = hashlib.file_digest(file, "sha256")
    return FileDigest(name=name, size=file.tell(), sha256=digest.hexdigest())


def _temporary_name(path: Path, marker: str) -> Path:
    return path.with_name(f".{path.name}{marker}{uuid.uuid4().hex[:8]}")
