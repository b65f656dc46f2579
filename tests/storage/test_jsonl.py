"""JSON Lines files: complete lines after kills and failed writes, and truncation to a step."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from clotho.storage.jsonl import JsonlWriter, encode, truncate_after
from protocols.errors import RunDirectoryError


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


def test_truncation_removes_later_and_incomplete_lines(tmp_path: Path) -> None:
    """Lines of the step itself and lines without a step are kept unchanged."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"z": 1, "step": 0}\n{"step": 5}\n{"event": "x"}\n{"step": 6}\n{"step": 5, "b": [1]}\n{"step": 4')
    truncate_after(path, 5)
    assert path.read_text() == '{"z": 1, "step": 0}\n{"step": 5}\n{"event": "x"}\n{"step": 5, "b": [1]}\n'
    truncate_after(path, -1)
    assert path.read_text() == '{"event": "x"}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncation_ignores_a_missing_file(tmp_path: Path) -> None:
    """A run may be killed before its first line."""
    truncate_after(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_truncation_refuses_invalid_lines_and_keeps_the_file(tmp_path: Path) -> None:
    """A kill can only damage the last line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2"):
        truncate_after(path, 5)
    assert path.read_text() == '{"step": 1}\nhello\n{"step": 2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
