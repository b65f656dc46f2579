"""docs/flow.md names files that exist; docs/flow-modules.md has the modules of three paths as they execute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.trace_modules import TRACED, listed, traced

MAX_MODULES = {"training": 83, "request": 40, "flag": 11}
ROOT = Path(__file__).parents[2]


def test_every_file_on_the_page_exists() -> None:
    """Every invariant names at least one test."""
    page = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:actors|attachments|clotho|tests|training_run)/[\w/]+\.py)`", page))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    invariants = re.findall(r"^\| \*\*(.+?)\*\*.*\| (.*?) \|$", page, re.MULTILINE)
    assert len(invariants) == 8
    assert all("tests/" in where for _, where in invariants)


@pytest.mark.parametrize("process", sorted(set(TRACED.values())))
def test_the_modules_of_a_path_are_those_that_execute(process: str) -> None:
    """Regenerate the lists with `python -m tests.docs.trace_modules write`."""
    found = traced(process)
    assert found.keys() == {path for path, where in TRACED.items() if where == process}
    assert {path: set(found[path]) ^ set(listed(path)) for path in found} == {path: set() for path in found}


@pytest.mark.parametrize("path", TRACED)
def test_a_path_has_few_modules(path: str) -> None:
    """A reader follows the path from file to file."""
    assert len(listed(path)) <= MAX_MODULES[path]
