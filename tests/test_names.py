"""Names that a reader looks up."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tests.test_layering import PROGRAM, ROOT, files

SHARED = {
    "Backend", "Call", "Change", "Choice", "Completions", "Generator", "Layer", "Load", "LowRank",
    "MessageParser", "Part", "Plan", "Quota", "Row", "RunFacts", "ServedModel", "Tokenizer", "Turns",
    "Variant", "Weights",
}  # fmt: skip
"""Names that several classes still have. The list only becomes shorter."""


def test_a_class_has_a_name_of_its_own() -> None:
    """Two public classes of one name are confused in a search, a traceback and a review."""
    names = Counter(
        name
        for path in files(*PROGRAM)
        for name in re.findall(r"^ *class ([A-Za-z]\w*)[(\[:]", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {name for name, number in names.items() if number > 1} - SHARED == set()


LONGEST_WITHOUT = 12
"""Lines of a function inside another one that its name explains."""


def undocumented(node: ast.AST, path: tuple[str, ...] = (), *, inside: bool = False) -> Iterator[str]:
    """Yield public classes, methods and functions without a docstring. inside: in a function.

    Methods of a private class with bases are left out: their base documents them.
    """
    overrides = isinstance(node, ast.ClassDef) and node.name.startswith("_") and bool(node.bases)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                yield from undocumented(child, path, inside=inside)
            continue
        here = (*path, child.name)
        lines = (child.end_lineno or child.lineno) - child.lineno + 1
        needs = not child.name.startswith("_") and not overrides and (not inside or lines > LONGEST_WITHOUT)
        if needs and not ast.get_docstring(child):
            yield ".".join(here)
        yield from undocumented(child, here, inside=inside or not isinstance(child, ast.ClassDef))


def test_public_names_have_a_docstring() -> None:
    """Methods of private classes too, which ruff leaves out, and long functions inside others."""
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(*PROGRAM)
        for name in undocumented(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set()
