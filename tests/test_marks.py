"""Marks of test modules, which Python would let a module lose without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "attachments").glob("*/tests/**/*.py")]
DEVICE_PATH = "def test_this_module_computes_on_the_device_path("


def marks(path: Path) -> Iterator[str]:
    """Yield the value of every assignment to `pytestmark`."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text if "pytestmark" in text else "")):
        if isinstance(node, ast.Assign) and "pytestmark" in map(ast.unparse, node.targets):
            yield ast.unparse(node.value)


def test_a_module_assigns_its_marks_once() -> None:
    """A second assignment would remove the marks of the first."""
    found = {str(path.relative_to(ROOT)): len(list(marks(path))) for path in TESTS}
    assert {name for name, count in found.items() if count > 1} == set()


def test_modules_for_the_device_path_assert_that_they_use_it() -> None:
    """On Linux, such a module would otherwise pass on the host path."""
    modules = [path for path in TESTS if any("device_path" in mark for mark in marks(path))]
    assert len(modules) >= 4
    assert [path.name for path in modules if DEVICE_PATH not in path.read_text(encoding="utf-8")] == []


def test_marks_of_linux_state_their_reason() -> None:
    """By name: on another system, the reason is that of the skipped test."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS
        if "needs_linux" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr == "needs_linux"
        and "needs_linux(reason=" not in _line(text, node)
    ]
    assert found == []


def _line(text: str, node: ast.Attribute) -> str:
    return text.splitlines()[node.lineno - 1]
