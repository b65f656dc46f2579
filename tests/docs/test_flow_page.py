"""docs/flow.md points at what exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_that_the_page_names_is_there() -> None:
    """Each invariant is tested where the page says so."""
    page = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:actors|tests)/[\w/]+\.py)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    invariants = re.findall(r"^\| \*\*(.+?)\*\*.*\| (.*?) \|$", page, re.MULTILINE)
    assert len(invariants) == 8
    assert all("tests/" in where for _, where in invariants)
