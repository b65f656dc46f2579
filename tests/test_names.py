"""Names that a reader looks up."""

from __future__ import annotations

import ast
from collections import Counter

from tests.test_layering import PROGRAM, files

SHARED = {
    "Backend", "Call", "Change", "Choice", "Completions", "Files", "Generator", "Layer", "Load", "LowRank", "Part",
    "Plan", "Quota", "Row", "RunFacts", "SampledTokens", "ServedModel", "Tokenizer", "Turns", "Variant", "Weights",
}  # fmt: skip
"""Names that several classes still have. The list only becomes shorter."""


def test_a_class_has_a_name_of_its_own() -> None:
    """Two public classes of one name are confused in a search, a traceback and a review."""
    names = Counter(
        node.name
        for path in files(*PROGRAM)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, number in names.items() if number > 1} - SHARED == set()
