"""JSON Lines files: complete lines after kills and failed writes, and truncation to a step."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec import Struct

from protocols.errors import RunDirectoryError
from training_run.directory.jsonl import JsonlWriter, Scan, encode, rewrite, scan, sync_files


def lines(path: Path) -> list[Any]:
    """Every line, parsed."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class FailingDisk:
    """Replacement for os.pwrite: writes `room` bytes, a few at a time, then fails like a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, file: int, data: bytes, position: int) -> int:
        free = position + len(data) <= os.fstat(file).st_size
        if not free and self.room <= 0 and data:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data if free else data[: max(1, min(self.room, 5))]
        self.room -= 0 if free else len(part)
        return self._write(file, part, position)


@pytest.mark.parametrize(("terminal_safe", "written"), [(True, b'["\\u202e"]'), (False, '["\u202e"]'.encode())])
def test_invisible_characters_are_escaped_for_terminals_only(terminal_safe: bool, written: bytes) -> None:
    """U+202E reverses the order of the characters that follow. Both forms have the same value."""
    assert encode(["\u202e"], terminal_safe=terminal_safe) == written
    assert json.loads(written) == ["\u202e"]


def test_reopening_a_file_continues_it(tmp_path: Path) -> None:
    """A resumed run appends."""
    path = tmp_path / "m.jsonl"
    for first in (0, 2):
        writer = JsonlWriter(path)
        writer.append({"step": first})
        writer.append({"step": first + 1})
        writer.close()
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"", b'{"step": 2}'], ids=["half", "none", "no newline"])
def test_an_incomplete_last_line_is_removed(torn: bytes, tmp_path: Path) -> None:
    """Opening the file repairs what a kill left."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n' + torn)
    writer = JsonlWriter(path)
    writer.append({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]
    writer.close()


def test_a_full_disk_leaves_no_partial_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next write is attempted again."""
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.append({"step": 1})
    disk = FailingDisk(monkeypatch, room=7)
    with pytest.raises(OSError, match="No space"):
        writer.append({"step": 2, "text": "x" * 50})
    assert lines(writer.path) == [{"step": 1}]
    disk.room = 1000
    writer.append({"step": 2})
    assert lines(writer.path) == [{"step": 1}, {"step": 2}]
    writer.close()


def test_lines_of_different_threads_do_not_mix(tmp_path: Path) -> None:
    """The event loop and the compute thread write to the event log."""
    writer = JsonlWriter(tmp_path / "m.jsonl")

    def write(source: int) -> None:
        for _ in range(200):
            writer.append({"from": source, "text": "x" * 100})

    threads = [Thread(target=write, args=(source,)) for source in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(lines(writer.path)) == 800


def test_values_without_a_json_form_are_replaced() -> None:
    """NaN, infinities, lone surrogates and unknown objects never break a line."""
    record = {"nan": float("nan"), "inf": [float("-inf")], "half": "a\ud800b", "path": Path("x"), "line": "a\nb\u2028"}
    line = encode(record)
    assert b"\n" not in line
    assert json.loads(line) == {"nan": None, "inf": [None], "half": "a\ufffdb", "path": "x", "line": "a\nb\u2028"}


def test_a_file_that_cannot_be_opened_raises_run_directory_error(tmp_path: Path) -> None:
    """A closed file raises ValueError."""
    with pytest.raises(RunDirectoryError, match=r"cannot be written: Is a directory"):
        JsonlWriter(tmp_path)
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.append({})


class Line(Struct):
    """The keys that every line must have."""

    step: int


def repaired(path: Path, step: int) -> tuple[Scan, list[Any]]:
    """Truncate a file. Return the scan, and the lines that are left."""
    found = scan(path, step, Line)
    rewrite(found, step, Line)
    return found, lines(path)


def test_truncation_removes_the_lines_of_later_steps(tmp_path: Path) -> None:
    """Lines up to the step are kept unchanged, in their order. No other file is left."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"z": 1, "step": 0}\n{"step": 5}\n{"step": 6}\n{"step": 5, "b": [1]}\n')
    found, _ = repaired(path, 5)
    assert (list(found.recorded), list(found.repeated), found.later, len(found.invalid)) == ([0, 5], [5], 1, 0)
    assert path.read_text() == '{"z": 1, "step": 0}\n{"step": 5}\n{"step": 5, "b": [1]}\n'
    assert repaired(path, -1)[1] == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("damaged", "steps", "padding", "invalid"),
    [
        (b'{"step":1}\n{"step":2}\n{"st', [1, 2], 0, [3]),
        (b'{"step":1}\n{"step":2}', [1, 2], 0, []),
        (b'{"step":1}\n{"step":2}\n' + bytes(4096), [1, 2], 4096, []),
        (b'{"step":1}\n{"step":2}\n' + bytes(50) + b"\n", [1, 2], 50, []),
        (b'{"step":1}\n{"st' + bytes(9) + b'{"step":2}\n', [1, 2], 9, [2]),
        (b'{"step":1}\n{"st{"step":2}\n{"step":3}\n', [1, 3], 0, [2]),
        (b'{"step":1}\nhello\n\xff\xfe\n[1]\n{"step":"x"}\n{}\n{"step":2}\n', [1, 2], 0, [2, 3, 4, 5, 6]),
        (b'{"step":1,"text":"\xff"}\n{"step":2}\n', [2], 0, [1]),
        (b'{"step":1}\n' + b"[" * 100_000 + b'\n{"step":2}\n\n \n', [1, 2], 0, [2]),
    ],
    ids=["torn", "no newline", "NUL", "NUL and newline", "NUL in the middle", "merged", "foreign", "UTF-8", "deep"],
)
def test_damage_is_repaired_and_counted(
    tmp_path: Path, damaged: bytes, steps: list[int], padding: int, invalid: list[int]
) -> None:
    """Every complete line survives. The scan tells what the rewrite removes, and a second scan finds nothing."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(damaged)
    found, left = repaired(path, 9)
    assert list(found.recorded) == steps == [line["step"] for line in left]
    assert (found.padding, list(found.invalid)) == (padding, invalid)
    assert path.read_bytes().endswith(b"\n")
    again = scan(path, 9, Line)
    assert (again.padding, len(again.invalid), again.unterminated) == (0, 0, False)


def test_the_memory_of_a_scan_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A record is not kept; numbers that follow each other are one range."""
    path, peaks = tmp_path / "metrics.jsonl", list[int]()
    for steps in (1_000, 20_000):
        path.write_bytes(b"".join(b'{"step":%d}\n' % step for step in range(steps)))
        tracemalloc.start()
        assert len(scan(path, steps, Line).recorded) == steps
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_a_scan_changes_nothing_and_an_intact_file_is_not_rewritten(tmp_path: Path) -> None:
    """A missing file stays missing."""
    path = tmp_path / "metrics.jsonl"
    missing = scan(path, 5, Line)
    rewrite(missing, 5, Line)
    assert (missing.exists, list(tmp_path.iterdir())) == (False, [])
    path.write_bytes(b'{"step": 1}\n{"st')
    assert scan(path, 5, Line).changed
    assert path.read_bytes() == b'{"step": 1}\n{"st'
    path.write_bytes(b'{"step": 1}\n')
    inode = path.stat().st_ino
    rewrite(scan(path, 5, Line), 5, Line)
    assert path.stat().st_ino == inode


def test_a_path_that_is_not_a_file_is_refused(tmp_path: Path) -> None:
    """A named pipe would block for ever."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("directory", "pipe"):
        with pytest.raises(RunDirectoryError, match="not a regular file"):
            scan(tmp_path / name, 5, Line)


def test_a_rewrite_that_fails_keeps_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, the old contents remain."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    found = scan(path, 1, Line)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RunDirectoryError, match="cannot be rewritten: No space"):
        rewrite(found, 1, Line)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def full_disk(descriptor: int) -> None:
    """Replacement for os.fsync."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_files_are_synced_if_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fsync for each file; an error of the disk is raised."""
    (tmp_path / "a").write_text("a")
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    sync_files([tmp_path / "a", tmp_path / "missing"])
    assert synced == [(tmp_path / "a").stat().st_ino]
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        sync_files([tmp_path / "a"])
