"""Generates the table of docs/changing.md: how many source files mention an instance of each kind of change.

python -m tests.docs.change_reference
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from clotho.inference.engine import EngineStats
from protocols.sampling import Sampling
from protocols.step import UpdateMetrics
from tests.docs.pages import DOCS, ROOT, replace_between
from training_run.profile.keys import KEYS

PAGE = DOCS / "changing.md"
ROOMS = ("actors", "attachments", "clotho", "protocols", "training_run")
DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")
HEADING = "| change | counted | median | worst case |\n|---|---:|---:|---|"
Files = frozenset[str]

OWN: Mapping[type[ast.AST], str] = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias), "name"),
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
}
"""The field of a node that has its identifier."""


class Cost(NamedTuple):
    """Files per change of one kind: the median, and the instance that is in most files, with their number."""

    kind: str
    counted: int
    median: float
    worst: str
    most: int

    def row(self) -> str:
        """The row of the table."""
        return f"| {self.kind} | {self.counted} | {self.median:g} | {self.most} (`{self.worst}`) |"


class Source(NamedTuple):
    """What one file mentions, docstrings and comments left out.

    names: identifiers, texts that are one, and the parts of names with dots within texts. defined: its asynchronous
    functions and classes. rows: texts that begin with a slash, with the names beside each in a call or a table.
    """

    names: Files
    defined: Files
    rows: tuple[tuple[str, Files], ...]


def modules() -> Iterator[Path]:
    """Source files of the program, tests left out."""
    yield ROOT / "pipeline.py"
    for room in ROOMS:
        yield from (path for path in (ROOT / room).rglob("*.py") if "tests" not in path.parts)


@cache
def sources() -> Mapping[str, Source]:
    """What every source file mentions, by its path."""
    return {
        str(path.relative_to(ROOT)): read(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(modules())
    }


def read(tree: ast.Module) -> Source:
    """Return what a module mentions."""
    nodes = list(ast.walk(tree))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    names, defined = set[str](), set[str]()
    rows: list[tuple[str, Files]] = []
    for node in nodes:
        names |= identifiers(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            names |= {node.value} if node.value.isidentifier() else set()
            names.update(part for text in DOTTED.findall(node.value) for part in text.split("."))
        elif isinstance(node, ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Dict):
            rows += [beside(key, [value]) for key, value in zip(node.keys, node.values, strict=True) if is_path(key)]
        elif isinstance(node, ast.Call):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            rows += [beside(value, values) for value in values if is_path(value)]
    return Source(frozenset(names), frozenset(defined), tuple(rows))


def identifiers(node: ast.AST) -> set[str]:
    """The identifiers that one node of a syntax tree has itself."""
    name = getattr(node, OWN[type(node)]) if type(node) in OWN else None
    return set(name.split(".")) if name else set()


def is_path(node: ast.AST | None) -> bool:
    """Whether an expression is the path of an endpoint."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"/\w", node.value) is not None


def beside(path: ast.AST | None, others: list[ast.expr]) -> tuple[str, Files]:
    """The path of an endpoint, and the names in the expressions beside it."""
    assert isinstance(path, ast.Constant)
    return str(path.value), frozenset(name for one in others for node in ast.walk(one) for name in identifiers(node))


def with_name(name: str) -> Files:
    """Files that mention a name: as an identifier or a text, or as a part of a name with dots."""
    return frozenset(path for path, source in sources().items() if name in source.names)


def with_stem(stem: str) -> Files:
    """Files with a name that contains a word, in any case: `dora` is in `use_dora` and `DoRALinear`."""
    return frozenset(path for path, source in sources().items() if any(stem in name.lower() for name in source.names))


def with_endpoint(endpoint: str) -> Files:
    """Files that mention a path, and those that define its handler and the formats of its bodies."""
    found = {path for path, source in sources().items() if any(endpoint == row for row, _ in source.rows)}
    names = {name for source in sources().values() for row, others in source.rows if row == endpoint for name in others}
    for name in names:
        places = [path for path, source in sources().items() if name in source.defined]
        found |= set(places) if len(places) == 1 else set()
    return frozenset(found)


def long(names: tuple[str, ...]) -> list[str]:
    """Names of several words. A single word, such as `seed`, is the name of other things too."""
    return [name for name in names if "_" in name]


def endpoints() -> list[str]:
    """The endpoints of docs/http-api.md, without those whose path has a parameter."""
    table = (DOCS / "http-api.md").read_text(encoding="utf-8").split("## Endpoints")[1].split("```")[0]
    rows = [row for row in table.splitlines() if re.match(r"\| `(GET|POST) /", row)]
    return sorted({path for row in rows for path in re.findall(r"`(?:\w+ )?(/[a-z\d_/.]+[a-z])`", row.split(" | ")[0])})


def keys() -> dict[str, Files]:
    """Files of every key of a profile whose last part no other key has."""
    leaves = [path.rpartition(".")[2] for path in KEYS]
    once = {path: leaf for path, leaf in zip(KEYS, leaves, strict=True) if leaves.count(leaf) == 1}
    return {path: with_name(leaf) for path, leaf in once.items() if long((leaf,))}


@cache
def costs() -> tuple[Cost, ...]:
    """The rows of the table."""
    kinds: dict[str, Mapping[str, Files]] = {
        "configuration key": keys(),
        "sampling parameter": {name: with_name(name) for name in long(Sampling.__struct_fields__)},
        "metric of an update": {name: with_name(name) for name in long(UpdateMetrics.__struct_fields__)},
        "gauge of the engine": {name: with_name(name) for name in long(EngineStats.__struct_fields__)},
        "endpoint": {path: with_endpoint(path) for path in endpoints()},
        "tracker": {name: with_stem(name) for name in ("wandb", "trackio", "tensorboard")},
        "adapter method": {name: with_stem(name) for name in ("dora", "rslora")},
    }
    return tuple(cost(kind, files) for kind, files in kinds.items())


def cost(kind: str, files: Mapping[str, Files]) -> Cost:
    """The row of one kind. files: of each instance."""
    numbers = {name: len(found) for name, found in files.items()}
    assert all(numbers.values()), [name for name, number in numbers.items() if not number]
    worst = max(numbers, key=lambda name: (numbers[name], name))
    return Cost(kind, len(numbers), median(numbers.values()), worst, numbers[worst])


def table() -> str:
    """The table of the page."""
    return "\n".join([HEADING, *(one.row() for one in costs())])


if __name__ == "__main__":
    replace_between(PAGE, "costs", table())
