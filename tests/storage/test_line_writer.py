"""JSON lines that are whole or not there, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from clotho.storage.jsonl_writer import LineWriter, encode
from protocols.errors import RunDirectoryError


def lines(path: Path) -> list[Any]:
    """Every line, parsed."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class FailingDisk:
    """os.pwrite that writes `room` more bytes, a few at a time, and then fails as a full disk does."""

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


def test_records_are_lines_and_reopening_goes_on(tmp_path: Path) -> None:
    """Append only; a resumed run continues the file."""
    path = tmp_path / "m.jsonl"
    for first in (0, 2):
        writer = LineWriter(path)
        writer.append({"step": first})
        writer.append({"step": first + 1})
        writer.close()
    assert [line["step"] for line in lines(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b"", b'{"step": 2}'], ids=["half", "none", "no newline"])
def test_a_line_torn_by_a_kill_is_removed(torn: bytes, tmp_path: Path) -> None:
    """The file of a killed run is valid again as soon as it is opened."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step":1}\n' + torn)
    writer = LineWriter(path)
    assert writer.last() == {"step": 1}
    writer.append({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]
    writer.close()


def test_the_last_record_can_be_extended_in_place(tmp_path: Path) -> None:
    """A measurement joins the line it belongs to; never twice, and never a line that is not there."""
    writer = LineWriter(tmp_path / "m.jsonl")
    assert not writer.extend_last({"accuracy": 1.0})
    writer.append({"step": 1})
    writer.append({"step": 2})
    assert writer.extend_last({"accuracy": 0.5, "kinds": {"a": 1.0}})
    assert not writer.extend_last({"accuracy": 0.7})
    writer.append({"step": 3})
    assert lines(writer.path) == [{"step": 1}, {"step": 2, "accuracy": 0.5, "kinds": {"a": 1.0}}, {"step": 3}]
    writer.close()


def test_a_full_disk_leaves_no_half_line_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an appended nor an extended line is ever half written."""
    writer = LineWriter(tmp_path / "m.jsonl")
    writer.append({"step": 1})
    disk = FailingDisk(monkeypatch, room=7)
    with pytest.raises(OSError, match="No space"):
        writer.append({"step": 2, "text": "x" * 50})
    assert lines(writer.path) == [{"step": 1}]
    with pytest.raises(OSError, match="No space"):
        writer.extend_last({"accuracy": 0.123456789})
    assert lines(writer.path) == [{"step": 1}]
    disk.room = 1000
    assert writer.extend_last({"accuracy": 0.5})
    writer.append({"step": 2})
    assert lines(writer.path) == [{"step": 1, "accuracy": 0.5}, {"step": 2}]
    writer.close()


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    """The log is written from the event loop and from the compute thread."""
    writer = LineWriter(tmp_path / "m.jsonl")

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


def test_what_json_cannot_say_is_made_sayable() -> None:
    """NaN, infinities, half characters and unknown objects never break a line."""
    record = {"nan": float("nan"), "inf": [float("-inf")], "half": "a\ud800b", "path": Path("x"), "line": "a\nb\u2028"}
    line = encode(record)
    assert b"\n" not in line
    assert json.loads(line) == {"nan": None, "inf": [None], "half": "a\ufffdb", "path": "x", "line": "a\nb\u2028"}


def test_a_file_that_cannot_be_opened_is_the_run_directorys_fault(tmp_path: Path) -> None:
    """Said before the run begins, in one line."""
    with pytest.raises(RunDirectoryError, match=r"cannot be written: Is a directory"):
        LineWriter(tmp_path)
    writer = LineWriter(tmp_path / "m.jsonl")
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.append({})
