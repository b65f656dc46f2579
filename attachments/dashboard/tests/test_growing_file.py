"""A growing file is read in whole lines, each once, whatever happens to the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attachments.dashboard import growing_file
from attachments.dashboard.growing_file import FileLine, GrowingFile, read_part, read_small


def read(file: GrowingFile) -> list[bytes]:
    """Return all lines that can be read now."""
    found, more = list[FileLine](), True
    while more:
        lines, more = file.read()
        found += lines
    return [line.data for line in found]


def test_each_whole_line_is_returned_once(tmp_path: Path) -> None:
    """A line without its newline waits for the rest."""
    path = tmp_path / "lines"
    file = GrowingFile(path)
    assert read(file) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert read(file) == [b"one", b"two"]
    with path.open("ab") as appended:
        appended.write(b"ee\nfour\n")
    assert read(file) == [b"three", b"four"]
    assert read(file) == []


def test_a_line_has_its_offset(tmp_path: Path) -> None:
    """The record of a line can be read later, alone."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\nthree\n")
    found, _ = GrowingFile(path).read()
    assert [read_part(path, line.offset, len(line.data)) for line in found] == [b"one", b"", b"three"]
    assert read_part(path, 9, 100) is None


@pytest.mark.parametrize("change", ["replaced", "truncated", "rewritten"])
def test_other_contents_are_read_from_the_beginning(tmp_path: Path, change: str) -> None:
    """A resumed run replaces its files; other contents of the same file and size are noticed too."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    file = GrowingFile(path)
    read(file)
    before = file.identity
    if change == "replaced":
        (tmp_path / "new").write_bytes(b"one\ntwo\nTHREE\nfour\n")
        os.replace(tmp_path / "new", path)
    elif change == "truncated":
        os.truncate(path, 4)
    else:
        path.write_bytes(b"one\ntwo\nTHREE\nfour\n")
    assert read(file)[0] == b"one"
    assert file.identity != before
    before = file.identity
    path.unlink()
    assert read(file) == []
    assert file.identity != before


def test_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    """A run directory can come from outside; a pipe would block the reader."""
    (tmp_path / "secret").write_bytes(b"secret\n")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        assert read(GrowingFile(tmp_path / name)) == []
        assert read_small(tmp_path / name, 100) is None
    assert read_small(tmp_path / "secret", 100) == b"secret\n"
    assert read_small(tmp_path / "secret", 3) is None


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 8 bytes, and lines of at most 16 bytes."""
    monkeypatch.setattr(growing_file, "BLOCK_BYTES", 8)
    monkeypatch.setattr(growing_file, "MAX_LINE_BYTES", 16)


@pytest.mark.usefixtures("small_blocks")
def test_a_line_that_is_too_long_is_skipped_and_counted(tmp_path: Path) -> None:
    """The lines beside it are read."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 12 + b"\n" + b"y" * 50 + b"\nlast\n")
    file = GrowingFile(path)
    assert read(file) == [b"one", b"x" * 12, b"last"]
    assert file.skipped == 1


def test_a_file_of_holes_is_read_in_a_few_blocks(tmp_path: Path) -> None:
    """A damaged or hostile file can have terabytes that are on no disk. What was written after them is read."""
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    os.truncate(path, 2**42)
    file = GrowingFile(path)
    assert read(file) == [b"one"]
    with path.open("ab") as growing:
        growing.write(b"\nlast\n")
    assert read(file) == [b"last"]
    assert file.skipped == 1
    assert read(GrowingFile(path)) == [b"one", b"last"]


PARTS = st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"\n", b"\n\n", b"x" * 40])), max_size=30)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=80)
@given(PARTS)
def test_any_contents_give_their_lines(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    """However the file grows, the lines are those of the whole file, except lines longer than the limit."""
    path = tmp_path_factory.getbasetemp() / "growing"
    path.unlink(missing_ok=True)
    file, found = GrowingFile(path), list[bytes]()
    with path.open("wb", buffering=0) as growing:
        for part in parts:
            growing.write(part)
            found += read(file)
    whole = b"".join(parts).split(b"\n")[:-1]
    assert [line for line in found if len(line) < 16] == [line for line in whole if len(line) < 16]
    assert len(found) + file.skipped == len(whole)
