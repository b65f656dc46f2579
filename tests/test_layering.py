"""Which module may import which, and the limits on the length of modules and functions.

    protocols      the standard library and msgspec
    clotho         protocols: the library
    training_run   protocols, clotho
    actors         protocols, clotho, training_run; never one another
    attachments    protocols, clotho, training_run, and the attachments that `NEEDS` names
    pipeline.py    everything but attachments

Nothing imports an attachment, so that each can be deleted with its folder. Inside the library, folders form the line of
`LIBRARY`. `profiles`, `bench` and `tests` are no part of the running program.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ("actors", "attachments", "clotho", "protocols", "training_run", "pipeline.py")
PROJECT = (*PROGRAM, "bench", "profiles", "tests", "conftest.py")
ACTORS = {
    "prompter", "generator", "atropos_fetcher", "scorer", "learner",
    "broadcaster", "checkpointer", "evaluator", "monitor",
}  # fmt: skip

MAY_IMPORT = {
    "protocols": set[str](),
    "clotho": {"protocols"},
    "training_run": {"protocols", "clotho"},
    "actors": {"protocols", "clotho", "training_run"},
    "attachments": {"protocols", "clotho", "training_run"},
    "pipeline": {"protocols", "clotho", "training_run", "actors"},
}
"""Rings, each with those that it may import besides itself."""

NEEDS = {"attachments.cluster": {"attachments.remote"}}
"""Attachments that import modules of others."""

ENTRIES = {"training_run.__main__": "pipeline"}
"""Modules that belong to another ring than their folder: the installed command hands the pipeline to the program."""

LIBRARY = {
    "settings": set[str](),
    "storage": set[str](),
    "data": set[str](),
    "lanes": {"settings"},
    "rewards": {"data", "settings"},
    "models": {"settings", "storage"},
    "inference": {"lanes", "models", "settings"},
    "scoring": {"inference", "models", "settings"},
    "training": {"models", "scoring", "settings", "storage"},
    "serving": {"lanes", "settings"},
}
"""Folders of the library, each with those that it may import. Modules beside the folders may import every folder."""

MATHEMATICS = (
    "clotho/models", "clotho/inference", "clotho/scoring", "clotho/training", "training_run/memory",
    "training_run/forced_decoder.py", "training_run/parity_check.py", "training_run/update_values.py",
    "attachments/cpu", "attachments/vcpo/baseline.py",
    "attachments/kv_quantization", "attachments/metal", "attachments/speculation", "attachments/replay",
    "attachments/router_replay", "attachments/preference/objectives.py",
)  # fmt: skip
EVENT_LOOPS = {"asyncio", "anyio", "starlette", "hypercorn", "httpx"}
MLX = {
    "clotho/backend.py", "clotho/models", "clotho/inference", "clotho/scoring", "clotho/training", "clotho/storage",
    "attachments", "training_run/adapters", "training_run/directory/checkpoints.py",
    "training_run/evaluation/held_out.py", "training_run/machine.py", "training_run/memory",
    "training_run/forced_decoder.py", "training_run/parity_check.py",
    "training_run/start/warmup_step.py", "training_run/update_values.py",
}  # fmt: skip
"""What imports MLX."""

LONGEST_MODULE, LONGEST_FUNCTION = 700, 80


def files(*places: str) -> list[Path]:
    """Every Python file there, as far as the place exists. The tests of attachments are left out."""
    found: list[Path] = []
    for place in places:
        found += [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    return [path for path in found if path.relative_to(ROOT).parts[0] != "attachments" or "tests" not in path.parts]


class Contents(NamedTuple):
    """What the rules below need of a file: imported modules with their lines, and functions with their lengths."""

    imports: list[tuple[str, int]]
    functions: list[tuple[str, int, int]]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements within a node, without their expressions, which are most of a syntax tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@cache
def contents(path: Path) -> Contents:
    """Parse a file. Of `from a import b`, the module is `a.b` if that is a module, and `a` otherwise."""
    found = Contents([], [])
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.imports.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.imports.append((full if is_module(full) else node.module, node.lineno))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            found.functions.append((node.name, node.lineno, node.end_lineno - node.lineno + 1))
    return found


@cache
def is_module(name: str) -> bool:
    """Whether a dotted name is a module of the project."""
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, wherever in it, with the line."""
    return contents(path).imports


def own_name(path: Path) -> str:
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    """The room that a module belongs to: its ring, and of an attachment also its name. None: not ours."""
    first, *rest = module.split(".")
    if first == "attachments" and rest:
        return f"attachments.{rest[0]}"
    return ENTRIES.get(module) or (first if first in MAY_IMPORT else None)


def may_import(room: str, other: str) -> bool:
    """Whether modules of one room may import modules of another."""
    ring = room.partition(".")[0]
    return other in {room, "attachments"} | MAY_IMPORT[ring] | NEEDS.get(room, set())


def test_rings_import_only_what_is_below_them() -> None:
    """Also inside functions, and for types only."""
    found: dict[str, list[str]] = {}
    for path in files(*PROGRAM):
        room = room_of(own_name(path))
        assert room, path
        others = {module: room_of(module) for module, _ in imports(path)}
        if wrong := sorted(module for module, other in others.items() if other and not may_import(room, other)):
            found[str(path.relative_to(ROOT))] = wrong
    assert found == {}


def test_needs_names_existing_attachments_only() -> None:
    """A deleted one is no longer needed."""
    rooms = {
        f"attachments.{path.name}" for path in (ROOT / "attachments").iterdir() if (path / "__init__.py").is_file()
    }
    assert NEEDS.keys() <= rooms
    assert set().union(*NEEDS.values()) <= rooms


def test_the_folders_of_the_library_form_a_line() -> None:
    """A folder that is added must be given its place."""
    order = list(LIBRARY)
    assert all(order.index(lower) < order.index(folder) for folder, below in LIBRARY.items() for lower in below)
    wrong = []
    for path in files("clotho"):
        folder = path.relative_to(ROOT).parts[1]
        if folder.endswith(".py"):
            continue
        for module, line in imports(path):
            other = module.split(".")[1] if module.startswith("clotho.") else folder
            if (ROOT / "clotho" / other).is_dir() and other not in {folder} | LIBRARY[folder]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {module}")
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    """Not even inside functions, or for types: a circle is read all at once or not at all.

    The package `clotho` has the types of all public names for editors, and imports a module when its name is used.
    """
    needs = {own_name(path): {module for module, _ in imports(path)} for path in files(*PROGRAM)}
    del needs["clotho"]
    done: set[str] = set()

    def circle(module: str, chain: tuple[str, ...]) -> tuple[str, ...]:
        if module in chain:
            return (*chain[chain.index(module) :], module)
        if module not in done:
            for other in sorted(needs.get(module, ())):
                if found := circle(other, (*chain, module)):
                    return found
            done.add(module)
        return ()

    assert [found for module in sorted(needs) if (found := circle(module, ()))] == []


def test_the_nine_actors_and_nothing_else_are_in_actors() -> None:
    """What actors are built from is below them."""
    assert {path.stem for path in (ROOT / "actors").rglob("*.py")} == ACTORS | {"__init__"}


def test_a_run_knows_nothing_of_the_other_commands() -> None:
    """The commands are built from the parts of a run, and not the other way round. Only the program knows them."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files("training_run", "actors", "pipeline.py")
        if not path.is_relative_to(ROOT / "training_run" / "commands") and path != ROOT / "training_run" / "main.py"
        for module, line in imports(path)
        if module.startswith("training_run.commands")
    ]
    assert wrong == []


def test_actors_never_import_one_another() -> None:
    """Actors meet in queues."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files("actors")
        for module, line in imports(path)
        if room_of(module) == "actors"
    ]
    assert wrong == []


def outside(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports that is not ours, by the first part of its name."""
    yield from ((module.split(".")[0], line) for module, line in imports(path) if room_of(module) is None)


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("protocols", {"msgspec"}),
        ("clotho/lanes/sampling_client.py", {"msgspec"}),
        ("training_run/supervision/queues.py", {"msgspec", "anyio"}),
        ("training_run/supervision/latest.py", {"anyio"}),
        ("training_run/supervision/supervisor.py", {"msgspec", "anyio"}),
    ],
)
def test_the_foundations_stand_on_little(place: str, allowed: set[str]) -> None:
    """Beside the standard library."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(place)
        for name, line in outside(path)
        if name not in sys.stdlib_module_names | allowed
    ]
    assert wrong == []


def test_mathematics_knows_nothing_of_event_loops() -> None:
    """Mathematics is synchronous."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*MATHEMATICS)
        for name, line in outside(path)
        if name in EVENT_LOOPS
    ]
    assert wrong == []


def test_mlx_is_used_by_mathematics_and_files_only() -> None:
    """Messages hold its arrays as values that nobody looks into."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*PROGRAM)
        if not any(path.is_relative_to(ROOT / place) for place in MLX)
        for name, line in outside(path)
        if name in ("mlx", "mlx_lm")
    ]
    assert wrong == []


def test_the_program_does_not_import_its_tools() -> None:
    """What makes the profiles, measures or tests is left at home."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*PROGRAM)
        for name, line in imports(path)
        if name.split(".")[0] in ("bench", "profiles", "tests", "pytest") or ".tests" in name
    ]
    assert wrong == []


def all_files() -> list[Path]:
    """Every Python file of the project, with the tests of attachments."""
    return [*files(*PROJECT), *sorted((ROOT / "attachments").glob("*/tests/**/*.py"))]


def test_modules_are_short() -> None:
    """A module that has outgrown the bound holds two ideas."""
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in all_files()}
    assert len(lengths) > 200
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_functions_are_short() -> None:
    """From `def` to the last line, docstring included."""
    long = {
        f"{path.relative_to(ROOT)}:{name}": length
        for path in all_files()
        for name, _, length in contents(path).functions
        if length > LONGEST_FUNCTION
    }
    assert long == {}
