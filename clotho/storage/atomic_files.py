"""Files that are whole or not there: written beside their place, forced to the disk, then renamed into it.

Line-by-line histories (metrics, rollouts) brought back to where a checkpoint stands.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from protocols.errors import RunDirectoryError

UNFINISHED = ".unfinished-"
"""Part of the name of everything that is still being written; what a killed process leaves carries it too."""

REPLACED = ".replaced-"
"""Part of the name of a directory that makes way for its successor, for the moment between two renames."""


class FileDigest(Struct, frozen=True, kw_only=True):
    """Size and SHA-256 (hexadecimal) of a file's contents."""

    name: str
    size: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a new file and force it to the disk. Not atomic by itself: `path` lies in an unfinished directory."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(name=path.name, size=size, sha256=digest.hexdigest())


def digest_file(path: Path) -> FileDigest:
    """Read a file back and digest it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(name=path.name, size=file.tell(), sha256=digest.hexdigest())


def replace_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Make `path` hold these contents, atomically: a reader, or a kill, sees the old file or the new one."""
    temporary = _beside(path, UNFINISHED)
    try:
        write_file(temporary, chunks)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Fill the yielded directory; at the end of the block it becomes `path`, all at once.

    A directory that is already there is moved aside first and removed after; `tidy` undoes a kill in between.
    After an error nothing has changed.
    """
    temporary = _beside(path, UNFINISHED)
    temporary.mkdir()
    aside = _beside(path, REPLACED)
    try:
        yield temporary
        sync_directory(temporary)
        if path.exists():
            path.rename(aside)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists():
            aside.rename(path)
        raise
    sync_directory(path.parent)
    if aside.exists():
        shutil.rmtree(aside)


def tidy(directory: Path) -> None:
    """Undo what a killed process left half done in `directory`, if it exists; the caller holds the run's lock."""
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
    """Whether a file or directory has the name of something half done."""
    return path.name.startswith(".") and (UNFINISHED in path.name or REPLACED in path.name)


def sync_directory(directory: Path) -> None:
    """Force a directory's entries to the disk: without it a rename may be lost with the power."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}{mark}{uuid.uuid4().hex[:8]}")


class _Line(Struct):
    """All that matters of a line; one without a step belongs to no step and stays."""

    step: int | None = None


def truncate_after(path: Path, step: int) -> None:
    """Keep the lines whose `step` is at most `step`, in one atomic rewrite; a file that does not exist stays so.

    The last line may be torn by a kill and is then dropped. Raises `RunDirectoryError` if any other is not JSON.
    """
    if not path.exists():
        return
    try:
        replace_file(path, _kept(path, step))
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be rewritten: {error.strerror or error}") from error


def _kept(path: Path, step: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                found = msgspec.json.decode(line, type=_Line).step
            except msgspec.MsgspecError as error:
                raise RunDirectoryError(f"{path}:{number}: not a line of this program: {error}") from error
            if found is None or found <= step:
                yield line
