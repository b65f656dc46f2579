"""docs/flow.md names files that exist, and lists the modules of three paths as they execute."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_on_the_page_exists() -> None:
    """Every invariant names at least one test."""
    page = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:actors|clotho|tests)/[\w/]+\.py)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    invariants = re.findall(r"^\| \*\*(.+?)\*\*.*\| (.*?) \|$", page, re.MULTILINE)
    assert len(invariants) == 8
    assert all("tests/" in where for _, where in invariants)
