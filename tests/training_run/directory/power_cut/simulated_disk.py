"""Simulated power cuts: from a record of all changes below a directory to the states that a crash may leave.

`recorder.c`, preloaded into a process, records each change and each fsync in order. `SimulatedDisk` applies the records
up to an instant. `after_cut` chooses what reached the disk, with the guarantees of POSIX and no others:

* The contents of a file are durable at its last fsync. Of later changes, each page of 4096 bytes is on the disk or not.
  A page that is not on the disk reads as before; beyond the old end it reads as NUL bytes, as on ext4, where the size
  can be written before the data.
* The entries of a directory are durable at the last fsync of that directory. Of later changes of its entries, a prefix
  is on the disk. A rename between two directories happens in both or in neither.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = 4096
HEADER = struct.Struct("<c7xqqqii")
SOURCE = Path(__file__).with_name("recorder.c")


def compiler() -> str | None:
    """Return the C compiler."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


RECORDABLE = [
    pytest.mark.needs_linux(reason="LD_PRELOAD"),
    pytest.mark.skipif(compiler() is None, reason="the recorder needs a C compiler"),
]
"""Marks of tests that record the changes of a process."""


def build_recorder(directory: Path) -> Path:
    """Compile the recorder."""
    library = directory / "recorder.so"
    command = [str(compiler()), "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def recording(library: Path, root: Path, journal: Path) -> dict[str, str]:
    """Return the environment variables that make a process record its changes below `root` (absolute, no links)."""
    return {"LD_PRELOAD": str(library), "RECORDED_ROOT": str(root), "RECORDED_JOURNAL": str(journal)}


class Change(NamedTuple):
    """One record. kind: a letter of recorder.c."""

    kind: str
    inode: int
    offset: int
    first: str
    second: str
    data: bytes


def read_journal(journal: Path) -> list[Change]:
    """Return all complete records."""
    contents, position, changes = journal.read_bytes(), 0, []
    while position + HEADER.size <= len(contents):
        kind, inode, offset, length, first, second = HEADER.unpack_from(contents, position)
        has_data = length if kind == b"w" else 0
        ends = [position := position + HEADER.size, position := position + first, position := position + second]
        position += has_data
        if position > len(contents):
            break
        changes.append(
            Change(
                kind.decode(),
                inode,
                offset,
                os.fsdecode(contents[ends[0] : ends[1]]),
                os.fsdecode(contents[ends[1] : ends[2]]),
                contents[ends[2] : position],
            )
        )
    return changes


class File:
    """Contents of a file: as processes see them, and as of the last fsync."""

    def __init__(self, contents: bytes = b"") -> None:
        self.now = bytearray(contents)
        self.durable = bytes(contents)

    def write(self, offset: int, data: bytes) -> None:
        """Write at an offset."""
        self.resize(max(len(self.now), offset + len(data)))
        self.now[offset : offset + len(data)] = data

    def resize(self, size: int) -> None:
        """Cut the file, or extend it by NUL bytes."""
        del self.now[size:]
        self.now.extend(bytes(size - len(self.now)))

    def sync(self) -> None:
        """Make the contents durable."""
        self.durable = bytes(self.now)

    def after_cut(self, chance: random.Random) -> bytes:
        """Return contents that a power cut may leave."""
        old, new = self.durable, bytes(self.now)
        if old == new:
            return new
        kept = chance.choice(["none", "all", "prefix", "pages", "size only"])
        if kept in ("none", "all"):
            return old if kept == "none" else new
        pages = range(0, max(len(old), len(new)), PAGE)
        limit = chance.choice(pages) if kept == "prefix" and pages else 0
        result = bytearray()
        for start in pages:
            written = start < limit if kept == "prefix" else kept == "pages" and chance.random() < 0.5
            page = (new if written else old)[start : start + PAGE]
            result += page.ljust(min(PAGE, len(new) - start), b"\0") if start < len(new) else b""
        if kept == "prefix" and chance.random() < 0.5:
            del result[max(limit, len(old)) :]
        return bytes(result[: len(new)])


class Directory:
    """Entries of a directory, as processes see them."""

    def __init__(self) -> None:
        self.entries: dict[str, File | Directory] = {}


class Entry(NamedTuple):
    """A change of entries: `node` gets a name in a directory, or the name is removed (None).

    source, source_name: the old place of a node that is renamed.
    """

    directory: Directory
    name: str
    node: File | Directory | None
    source: Directory | None = None
    source_name: str = ""

    @property
    def directories(self) -> list[Directory]:
        """The directories whose entries change."""
        return [self.directory] if self.source in (None, self.directory) else [self.directory, self.source]

    def apply(self, entries: dict[int, dict[str, File | Directory]]) -> None:
        """Apply the change to the entries of all directories, by identity."""
        if self.source is not None:
            entries.setdefault(id(self.source), {}).pop(self.source_name, None)
        here = entries.setdefault(id(self.directory), {})
        if self.node is None:
            here.pop(self.name, None)
        else:
            here[self.name] = self.node


class SimulatedDisk:
    """A directory and all changes of its contents."""

    def __init__(self, root: Path, *, empty: bool = False) -> None:
        """root: the directory in the journal. Its contents at this moment, before the first record, are durable.

        empty: the directory was empty before the first record.
        """
        self._root, self._top = root, Directory()
        self._inodes: dict[int, File] = {}
        self._changes: list[Entry] = []
        self._durable: set[int] = set()
        if not empty:
            self._load(self._top, root)
        self._before = {id(node): dict(node.entries) for node in self._directories(self._top)}

    def _load(self, node: Directory, contents: Path) -> None:
        for path in sorted(contents.iterdir()):
            if path.is_dir():
                child = node.entries[path.name] = Directory()
                self._load(child, path)
            else:
                file = node.entries[path.name] = File(path.read_bytes())
                self._inodes[path.stat().st_ino] = file

    def _directories(self, node: Directory) -> Iterator[Directory]:
        yield node
        for child in node.entries.values():
            if isinstance(child, Directory):
                yield from self._directories(child)

    def _find(self, path: str) -> File | Directory | None:
        node: File | Directory | None = self._top
        for part in Path(path).relative_to(self._root).parts:
            node = node.entries.get(part) if isinstance(node, Directory) else None
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        parent = self._find(str(Path(path).parent))
        assert isinstance(parent, Directory), path
        return parent, Path(path).name

    def _change(self, change: Entry) -> None:
        self._changes.append(change)
        if change.source is not None:
            change.source.entries.pop(change.source_name)
        if change.node is None:
            change.directory.entries.pop(change.name)
        else:
            change.directory.entries[change.name] = change.node

    def apply(self, change: Change) -> None:
        """Apply one record."""
        match change.kind:
            case "o":
                self._open(change)
            case "w":
                self._file(change).write(change.offset, change.data)
            case "t":
                self._file(change).resize(change.offset)
            case "s":
                self._sync(change)
            case "m":
                self._change(Entry(*self._parent(change.first), Directory()))
            case "u":
                self._change(Entry(*self._parent(change.first), None))
            case "r":
                source, source_name = self._parent(change.first)
                node = source.entries[source_name]
                self._change(Entry(*self._parent(change.second), node, source, source_name))
            case _:
                raise AssertionError(f"the simulation does not know this change: {change}")

    def _open(self, change: Change) -> None:
        node = self._find(change.first)
        if node is None:
            node = File()
            self._change(Entry(*self._parent(change.first), node))
        assert isinstance(node, File), change
        self._inodes[change.inode] = node
        if change.offset:
            node.resize(0)

    def _file(self, change: Change) -> File:
        """Return the file of a record by its inode.

        Libraries can create and rename files by system calls that the recorder does not see (the `safetensors` library
        does). The next record of the inode has the new path, so that the change is known, if a little late.
        """
        file = self._inodes.get(change.inode)
        if change.first.endswith(" (deleted)"):
            assert file is not None, change
            return file
        found = self._find(change.first)
        if file is None or found is not file:
            source = None if file is None else self._entry_of(file, self._top)
            if file is None or source is None:
                file = self._inodes[change.inode] = File()
                self._change(Entry(*self._parent(change.first), file))
            else:
                self._change(Entry(*self._parent(change.first), file, *source))
        return file

    def _entry_of(self, file: File, below: Directory) -> tuple[Directory, str] | None:
        for name, node in below.entries.items():
            if node is file:
                return below, name
            if isinstance(node, Directory) and (found := self._entry_of(file, node)):
                return found
        return None

    def _sync(self, change: Change) -> None:
        node = self._find(change.first)
        if not isinstance(node, Directory):
            self._file(change).sync()
            return
        wanted = {id(node)}
        for number in reversed(range(len(self._changes))):
            touched = {id(directory) for directory in self._changes[number].directories}
            if touched & wanted:
                self._durable.add(number)
                wanted |= touched

    def write_to(self, target: Path) -> None:
        """Write the contents as processes see them."""
        _write(self._top, {}, target, None)

    def after_cut(self, target: Path, seed: int) -> None:
        """Write contents that a power cut may leave."""
        chance = random.Random(seed)
        entries = {number: dict(names) for number, names in self._before.items()}
        for number in sorted(self._surviving(chance)):
            self._changes[number].apply(entries)
        _write(self._top, entries, target, chance)

    def _surviving(self, chance: random.Random) -> set[int]:
        """Choose which changes of entries are on the disk: a prefix for each directory, with all durable changes."""
        surviving: set[int] = set()
        stopped: set[int] = set()
        keep = chance.choice([0.0, 0.5, 0.8, 0.95, 1.0])
        for number, change in enumerate(self._changes):
            touched = {id(directory) for directory in change.directories}
            if number in self._durable or (not touched & stopped and chance.random() < keep):
                surviving.add(number)
            else:
                stopped |= touched
        return surviving


def _write(
    node: Directory, entries: dict[int, dict[str, File | Directory]], target: Path, chance: random.Random | None
) -> None:
    """Write a directory. entries: those of every directory by identity; those that processes see if there is no chance.

    The order of the names makes the choices a function of the seed.
    """
    target.mkdir(parents=True)
    here = node.entries if chance is None else entries.get(id(node), {})
    for name, child in sorted(here.items()):
        if isinstance(child, Directory):
            _write(child, entries, target / name, chance)
        else:
            (target / name).write_bytes(bytes(child.now) if chance is None else child.after_cut(chance))
