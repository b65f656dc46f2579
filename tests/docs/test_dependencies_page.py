"""docs/dependencies.md: names of mlx and mlx-lm that their manuals do not promise, and the bounds of their versions."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.pages import DOCS, ROOT, between

LISTED = set(re.findall(r"^\| `([\w.]+)` \| \w", between(DOCS / "dependencies.md", "names"), re.MULTILINE))
PLACES = ("actors", "attachments", "clotho", "profiles", "protocols", "training_run")


def is_private(name: str) -> bool:
    """Whether a name has a leading underscore, and is none of Python's."""
    return name.startswith("_") and not name.startswith("__")


def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of the syntax tree of a module."""
    return list(ast.walk(ast.parse(source)))


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """Private functions, classes, and attributes of `self` that a module defines."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names = [name]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        yield from filter(is_private, names)


@cache
def place_of(package: str) -> Path:
    """The directory of an installed package."""
    spec = find_spec(package)
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


DEFINITION = re.compile(
    r"^\s*(?:async )?(?:def|class) (_(?!_)\w+)|\b(?:self|cls)\.(_(?!_)\w+)\b|^\s*(_(?!_)\w+):", re.MULTILINE
)
FOREIGN = re.compile(r"\bmlx_lm\b|(?<!\bself)(?<!\bcls)\._(?!_)\w")
"""What a module has that uses names of the table."""


def private_names_of(package: str) -> set[str]:
    """Private names that the modules of an installed package define."""
    files = list(place_of(package).rglob("*.py"))
    assert files
    found = (DEFINITION.findall(path.read_text(encoding="utf-8")) for path in files)
    return {name for names in found for groups in names for name in groups if name}


@cache
def theirs() -> set[str]:
    """Private names of mlx and mlx-lm."""
    return private_names_of("mlx") | private_names_of("mlx_lm")


def imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the name in this module, and the full name, of everything that is imported from mlx-lm."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mlx_lm":
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("mlx_lm.") for alias in node.names), "import the name from its module"


def used(source: str) -> Iterator[str]:
    """Names of the table that a module uses.

    A private attribute counts if mlx or mlx-lm defines it, and this module does not, unless it calls the method that
    it overrides.
    """
    nodes = nodes_of(source)
    own, names = set(defined(nodes)), dict(imported(nodes))
    modules = {name: full for name, full in names.items() if is_module(full)}
    yield from (model_or_name(full) for full in names.values() if not is_module(full) and full.count(".") > 1)
    for node in nodes:
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in modules:
            yield model_or_name(f"{modules[node.value.id]}.{node.attr}")
        elif node.attr in theirs():
            value = ast.unparse(node.value)
            if value == "super()" or (value not in ("self", "cls") and node.attr not in own):
                yield f".{node.attr}"


def is_module(name: str) -> bool:
    """Whether a dotted name is a module of mlx-lm."""
    place = place_of("mlx_lm").joinpath(*name.split(".")[1:])
    return place.is_dir() or place.with_suffix(".py").is_file()


def model_or_name(full: str) -> str:
    """The module of an architecture, whose classes have the same names in all of them; otherwise the name itself."""
    match = re.fullmatch(r"(mlx_lm\.models\.(?!activations|base|cache|switch_layers)\w+)(\.\w+)?", full)
    return match[1] if match else full


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from mlx_lm.utils import load_model as load", {"mlx_lm.utils.load_model"}),
        ("from mlx_lm.models import base\nbase.attend", {"mlx_lm.models.base.attend"}),
        ("from mlx_lm.models.llama import Model", {"mlx_lm.models.llama"}),
        ("from mlx_lm import generate\nimport mlx.nn as nn\nnn.Linear", set()),
        ("layer.dropout._p_1", {"._p_1"}),
        ("class Layer:\n    def _p_1(self): return self._p_1, other._p_1", set()),
        ("class Layer:\n    def _p_1(self): return super()._p_1", {"._p_1"}),
    ],
)
def test_names_are_found_in_a_source(source: str, names: set[str]) -> None:
    """However they are imported; what a module defines itself is its own."""
    assert set(used(source)) == names


def test_the_page_lists_the_names_that_the_sources_use() -> None:
    """A new name needs a row; the row of a name that is no longer used, or that mlx has removed, goes."""
    paths = [ROOT / "pipeline.py", *(path for place in PLACES for path in (ROOT / place).rglob("*.py"))]
    sources = (path.read_text(encoding="utf-8") for path in paths if "tests" not in path.parts)
    assert {name for source in sources if FOREIGN.search(source) for name in used(source)} == LISTED


def test_versions_are_bounded_above() -> None:
    """The next minor version of mlx or mlx-lm may have changed a name of the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [one for one in map(Requirement, project["dependencies"]) if one.name in ("mlx", "mlx-lm")]
    assert len(bounds) == 3
    assert [one.name for one in bounds if not any(part.operator == "<" for part in one.specifier)] == []
