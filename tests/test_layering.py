"""Who may import whom, and how long anything may be: the layout of the project, as rules that fail when broken.

    protocols                    the standard library and msgspec
    user_code                    nothing: imports what a profile names
    compute, rewards, artifacts  protocols, and themselves; compute and rewards also user_code
    runtime                      protocols, and itself
    display                      protocols, and artifacts (numbers in words)
    gateway                      protocols, runtime, and itself
    atropos                      protocols, runtime, drawn
    drawn                        protocols: what the engine drew for whom
    books                        protocols, runtime: where every group is
    sampler                      protocols: the asynchronous face of the engine, for everyone who samples
    replay, forming_batch,       the learner's own, plain Python: protocols
    alarms
    custom, questions            shared by the wiring; the boxes do not know them
    the boxes                    all of the above but gateway, custom, questions; never one another
    assembly, session, boxes,    belong to `pipeline.py`: they, and it alone, may import everything
    command_line

MLX lives under compute and artifacts; asyncio and anyio never do. `profiles`, `bench` and `tests` are no part of the
running program, and may import what they measure or make.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ("actors", "protocols", "pipeline.py")
PROJECT = (*PROGRAM, "bench", "profiles", "tests")
BOXES = {
    "prompter", "generator", "atropos_fetcher", "scorer", "learner",
    "broadcaster", "checkpointer", "evaluator", "monitor",
}  # fmt: skip
LOWER = {
    "protocols", "runtime", "compute", "rewards", "artifacts", "display", "sampler",
    "replay", "forming_batch", "histories", "alarms", "atropos",
}  # fmt: skip

MAY_IMPORT = {
    "protocols": set[str](),
    "runtime": {"protocols"},
    "user_code": set[str](),
    "compute": {"protocols", "user_code"},
    "rewards": {"protocols", "user_code"},
    "artifacts": {"protocols"},
    "display": {"protocols", "artifacts"},
    "gateway": {"protocols", "runtime"},
    "sampler": {"protocols"},
    "atropos": {"protocols", "runtime", "drawn"},
    "drawn": {"protocols"},
    "books": {"protocols", "runtime"},
    "custom": {"protocols", "runtime", "user_code"},
    "questions": {"protocols", "compute", "artifacts"},
    "replay": {"protocols"},
    "forming_batch": {"protocols"},
    "histories": {"runtime"},
    "alarms": {"protocols"},
    "__init__": {"compute"},
    **dict.fromkeys(BOXES, LOWER),
}
"""Parts of the program; each may import itself besides. Those that belong to the wiring are not listed."""

WIRING = {"assembly", "session", "boxes", "command_line", "pipeline"}
LONGEST_MODULE, LONGEST_FUNCTION = 300, 50


def files(*places: str) -> list[Path]:
    """Every Python file there, as far as the place exists."""
    found: list[Path] = []
    for place in places:
        found += [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    return found


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(module: str) -> str | None:
    """The part of the program that a module belongs to: `clotho.inference` to `compute`. None: not ours."""
    first, *rest = module.split(".")
    if first in ("protocols", "pipeline"):
        return first
    if first != "actors":
        return None
    known = rest and ((ROOT / "actors" / rest[0]).is_dir() or (ROOT / "actors" / f"{rest[0]}.py").exists())
    return rest[0] if known else "__init__"


def own_name(path: Path) -> str:
    """A file's dotted name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_part_of_the_program_has_its_rule() -> None:
    """A module that is added must be given its place."""
    parts = {part_of(own_name(path)) for path in files(*PROGRAM)}
    assert parts - MAY_IMPORT.keys() - WIRING == set()
    assert parts >= BOXES


def test_parts_import_what_lies_below_them_and_never_one_another() -> None:
    """Boxes meet in mailboxes; only the wiring knows them all."""
    wrong = []
    for path in files(*PROGRAM):
        part = part_of(own_name(path))
        if part in WIRING:
            continue
        assert part
        for module, line in imports(path):
            target = part_of(module)
            if target not in (None, part, "__init__", *MAY_IMPORT[part]):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {module}")
    assert wrong == []


def outside(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports that is not ours, by the first part of its name."""
    yield from ((module.split(".")[0], line) for module, line in imports(path) if part_of(module) is None)


@pytest.mark.parametrize(
    ("place", "allowed"),
    [("protocols", {"msgspec"}), ("actors/runtime", {"msgspec", "anyio"}), ("clotho/inference/client.py", {"msgspec"})],
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
    """Everything under compute is synchronous."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files("actors/compute")
        for name, line in outside(path)
        if name in ("asyncio", "anyio", "starlette", "hypercorn")
    ]
    assert wrong == []


def test_mlx_is_used_by_mathematics_and_files_only() -> None:
    """Messages hold its arrays as values that nobody looks into."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(*PROGRAM)
        if part_of(own_name(path)) not in ("compute", "artifacts")
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
    long = {}
    for path in files(*PROJECT):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}
