"""Histories after a resume: exactly the lines up to the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from clotho.storage.atomic_files import truncate_after
from protocols.errors import RunDirectoryError


def test_later_and_torn_lines_go(tmp_path: Path) -> None:
    """Lines of the checkpoint's step stay, lines without a step too; other keys and their order are untouched."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"z": 1, "step": 0}\n{"step": 5}\n{"event": "x"}\n{"step": 6}\n{"step": 5, "b": [1]}\n{"step": 4')
    truncate_after(path, 5)
    assert path.read_text() == '{"z": 1, "step": 0}\n{"step": 5}\n{"event": "x"}\n{"step": 5, "b": [1]}\n'
    truncate_after(path, -1)
    assert path.read_text() == '{"event": "x"}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_does_not_exist_stays_so(tmp_path: Path) -> None:
    """A run may be killed before its first line."""
    truncate_after(tmp_path / "metrics.jsonl", 5)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_line_is_refused_and_the_file_kept(tmp_path: Path) -> None:
    """Only the last line can be torn by a kill; anything else is somebody's edit."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2"):
        truncate_after(path, 5)
    assert path.read_text() == '{"step": 1}\nhello\n{"step": 2}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
