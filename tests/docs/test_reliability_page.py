"""docs/reliability.md: every case has a row, and every row names existing tests."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from msgspec import Struct

from tests.docs.pages import DOCS, ROOT

PAGE = DOCS / "reliability.md"
CASES = 104
ROW = re.compile(r"^\| (?P<number>\d+) \| (?P<case>[^|]+) \| (?P<promise>[^|]+) \| (?P<tests>[^|]*) \|$", re.MULTILINE)
REFERENCE = re.compile(r"`(?P<file>[\w/]+\.py)::(?P<name>\w+)`")


class Row(Struct, frozen=True, kw_only=True):
    """One case. tests: (file below tests/, function)."""

    number: int
    case: str
    promise: str
    tests: list[tuple[str, str]]


def rows() -> list[Row]:
    """Return all rows of the tables."""
    return [
        Row(
            number=int(match["number"]),
            case=match["case"],
            promise=match["promise"],
            tests=REFERENCE.findall(match["tests"]),
        )
        for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))
    ]


@cache
def functions_of(file: str) -> frozenset[str]:
    """Return the names of the test functions of a file, without importing it."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_case_has_a_row() -> None:
    """The numbers of the rows are consecutive, and no case is listed twice."""
    assert [row.number for row in rows()] == list(range(1, CASES + 1))
    assert len({row.case for row in rows()}) == CASES


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_every_named_test_exists(row: Row) -> None:
    """Every row names at least one."""
    assert row.tests
    assert [f"{file}::{name}" for file, name in row.tests if name not in functions_of(file)] == []
