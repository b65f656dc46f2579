"""docs/reliability.md has a row for every case, and docs/reliability-tests.md names existing tests of every row."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import DOCS, ROOT

CASES = 108
CASE = re.compile(r"^\| (?P<number>\d+) \| (?P<case>[^|]+) \| [^|]+ \|$", re.MULTILINE)
TESTS = re.compile(r"^\| (?P<number>\d+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
REFERENCE = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>\w+)`")
TESTS_BY_CASE = {
    int(match["number"]): REFERENCE.findall(match["tests"])
    for match in TESTS.finditer((DOCS / "reliability-tests.md").read_text(encoding="utf-8"))
}
"""Number of a case -> (file below tests/, or of an attachment; function)."""


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the test functions of a file, without importing it."""
    path = ROOT / file if file.startswith("attachments/") else ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_case_has_a_row_and_tests() -> None:
    """The numbers are consecutive on both pages, and no case is listed twice."""
    rows = CASE.findall((DOCS / "reliability.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _ in rows] == list(range(1, CASES + 1))
    assert len({case for _, case in rows}) == CASES
    assert list(TESTS_BY_CASE) == list(range(1, CASES + 1))


@pytest.mark.parametrize("number", TESTS_BY_CASE)
def test_every_named_test_exists(number: int) -> None:
    """Every case has at least one."""
    assert TESTS_BY_CASE[number]
    assert [f"{file}::{name}" for file, name in TESTS_BY_CASE[number] if name not in functions_of(file)] == []
