"""Which packages may import which, and the limits on the length of modules and functions.

    protocols    the standard library and msgspec
    config       protocols; schema of profiles, flags
    runtime      protocols, config; knows nothing about RL
    data, storage
                 protocols, config
    cpu, models, inference, scoring, training, memory
                 protocols, config, storage, runtime, and each other as `MAY_IMPORT` says; never asyncio, anyio or
                 HTTP
    rewards      protocols, config, data
    atropos      protocols, config, runtime, inference.sample_log
    remote       protocols, config, runtime, storage
    cluster      protocols, config, cpu, runtime, storage, remote, rewards; `run` in the process of a worker
    distributed  protocols, config, models, scoring, training, storage, monitoring; `run` in the process of a rank
    serving      protocols, config, runtime; no mathematics
    monitoring   protocols, config, storage
    artifacts    protocols, config, storage, models, monitoring
    dashboard    protocols, config, storage, monitoring, serving; never MLX
    preflight    everything below; never serving, atropos, remote, actors, `run` or `commands`
    actors       everything below; never one another, `serving`, `run` or `commands`
    run          everything but `commands`
    commands, pipeline.py
                 everything

MLX lives in the mathematics, in storage and in what moves arrays between ranks. `profiles`, `bench` and `tests` are no
part of the running program.
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
PROGRAM = ("actors", "clotho", "protocols", "pipeline.py")
PROJECT = (*PROGRAM, "bench", "profiles", "tests")
ACTORS = {
    "prompter", "generator", "atropos_fetcher", "scorer", "learner",
    "broadcaster", "checkpointer", "evaluator", "monitor",
}  # fmt: skip
MATHEMATICS = ("cpu", "models", "inference", "scoring", "training", "memory")
EVENT_LOOPS = {"asyncio", "anyio", "starlette", "hypercorn", "httpx"}

MAY_IMPORT = {
    "protocols": set[str](),
    "config": {"protocols", "storage"},
    "runtime": {"protocols", "config"},
    "data": {"protocols", "config"},
    "storage": {"protocols", "config"},
    "cpu": {"protocols"},
    "models": {"protocols", "config", "cpu"},
    "inference": {"protocols", "config", "cpu", "models", "runtime"},
    "scoring": {"protocols", "config", "cpu", "models", "inference", "training"},
    "training": {"protocols", "config", "cpu", "models", "inference", "scoring", "runtime"},
    "memory": {"protocols", "config", "cpu", "models", "inference", "scoring", "training"},
    "rewards": {"protocols", "config", "runtime", "data"},
    "atropos": {"protocols", "config", "runtime", "inference"},
    "remote": {"protocols", "config", "runtime", "storage"},
    "cluster": {"protocols", "config", "cpu", "runtime", "storage", "remote", "rewards", "run"},
    "distributed": {"protocols", "config", "models", "scoring", "training", "storage", "monitoring", "run"},
    "serving": {"protocols", "config", "runtime"},
    "monitoring": {"protocols", "config", "storage"},
    "artifacts": {"protocols", "config", "storage", "models", "monitoring"},
    "dashboard": {"protocols", "config", "storage", "monitoring", "serving"},
    "preflight": {
        "protocols", "config", "runtime", "data", "storage", "cpu", "models", "inference", "scoring", "training",
        "memory", "rewards", "monitoring",
    },
    "actors": {
        "protocols", "config", "runtime", "data", "storage", "models", "inference", "scoring", "training", "memory",
        "rewards", "atropos", "monitoring",
    },
}  # fmt: skip
"""Packages, each with those that it may import besides itself. `run` and `pipeline` may import everything."""

WIRING = {"run", "commands", "pipeline", "clotho"}
LONGEST_MODULE, LONGEST_FUNCTION = 700, 80


def files(*places: str) -> list[Path]:
    """Every Python file there, as far as the place exists."""
    found: list[Path] = []
    for place in places:
        found += [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    return found


class Contents(NamedTuple):
    """What the rules below need of a file: imported modules with their lines, and functions with their lengths."""

    imports: list[tuple[str, int]]
    functions: list[tuple[str, int, int]]


@cache
def contents(path: Path) -> Contents:
    """Parse a file."""
    found = Contents([], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.imports.extend((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            found.imports.append((node.module, node.lineno))
            found.imports.extend((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            found.functions.append((node.name, node.lineno, node.end_lineno - node.lineno + 1))
    return found


def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that a file imports, wherever in it, with the line."""
    return contents(path).imports


def part_of(module: str) -> str | None:
    """The package that a module belongs to: `clotho.inference.engine` to `inference`. None: not ours."""
    first, *rest = module.split(".")
    if first == "clotho":
        return rest[0] if rest and (ROOT / "clotho" / rest[0]).is_dir() else "clotho"
    return first if first in ("protocols", "actors", "pipeline") else None


def own_name(path: Path) -> str:
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_package_has_its_rule() -> None:
    """A package that is added must be given its place."""
    assert {part_of(own_name(path)) for path in files(*PROGRAM)} - MAY_IMPORT.keys() == WIRING


def test_the_nine_actors_and_nothing_else_are_in_actors() -> None:
    """What actors are built from is in `clotho/`."""
    assert {path.stem for path in (ROOT / "actors").rglob("*.py")} == ACTORS | {"__init__"}


def test_packages_import_only_what_their_rule_allows() -> None:
    """Only the wiring may import everything."""
    wrong = []
    for path in files(*PROGRAM):
        part = part_of(own_name(path))
        if part in WIRING:
            continue
        assert part
        for module, line in imports(path):
            target = part_of(module)
            if target not in (None, part, "clotho", *MAY_IMPORT[part]):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {module}")
    assert wrong == []


def test_a_run_knows_nothing_of_the_other_commands() -> None:
    """The commands are built from the parts of a run, and not the other way round."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files("clotho/run", "pipeline.py")
        for module, line in imports(path)
        if part_of(module) == "commands"
    ]
    assert wrong == []


def test_actors_never_import_one_another() -> None:
    """Actors meet in queues."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in files("actors")
        for module, line in imports(path)
        if part_of(module) == "actors"
    ]
    assert wrong == []


def outside(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports that is not ours, by the first part of its name."""
    yield from ((module.split(".")[0], line) for module, line in imports(path) if part_of(module) is None)


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("protocols", {"msgspec"}),
        ("clotho/runtime/queues.py", {"msgspec", "anyio"}),
        ("clotho/runtime/latest.py", {"anyio"}),
        ("clotho/runtime/supervisor.py", {"msgspec", "anyio"}),
        ("clotho/runtime/sampling_client.py", {"msgspec"}),
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
        for path in files(*(f"clotho/{package}" for package in MATHEMATICS))
        for name, line in outside(path)
        if name in EVENT_LOOPS
    ]
    assert wrong == []


def test_mlx_is_used_by_mathematics_and_files_only() -> None:
    """Messages hold its arrays as values that nobody looks into."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*PROGRAM)
        if part_of(own_name(path)) not in (*MATHEMATICS, "storage", "artifacts", "distributed")
        for name, line in outside(path)
        if name in ("mlx", "mlx_lm")
    ]
    assert wrong == []


def test_the_program_does_not_import_its_tools() -> None:
    """What makes the profiles, measures or tests is left at home."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*PROGRAM)
        for name, line in outside(path)
        if name in ("bench", "profiles", "tests", "pytest")
    ]
    assert wrong == []


def test_modules_are_short() -> None:
    """A module that has outgrown the bound holds two ideas."""
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files(*PROJECT)
    }
    assert len(lengths) > 200
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_functions_are_short() -> None:
    """From `def` to the last line, docstring included."""
    long = {
        f"{path.relative_to(ROOT)}:{name}": length
        for path in files(*PROJECT)
        for name, _, length in contents(path).functions
        if length > LONGEST_FUNCTION
    }
    assert long == {}
