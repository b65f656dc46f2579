"""What a start loads: modules of the project, each of which costs time at every start and a file to read.

Handlers of requests, attachments that a run does not use, and commands are imported when they are used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.e2e.pipeline_process import UNEVALUATED

ROOT = Path(__file__).parents[1]
SMALL_RUN = (
    "pipeline.py", "--profile", "local-m3", "--steps", "1", *UNEVALUATED, "--data.curriculum", "success_rate",
    "--run-dir", "run",
)  # fmt: skip
RECORD = """
import atexit, json, runpy, sys

def record():
    files = sorted({getattr(module, "__file__", None) or "" for module in list(sys.modules.values())})
    types = sys.modules.get("clotho.serving.struct_types")
    unprepared = sorted({kind.__module__ for kind in types.prepare_struct_types()}) if types else []
    open(out, "w").write(json.dumps([files, unprepared]))

root, out, *sys.argv = sys.argv[1:]
sys.path.insert(0, root)
atexit.register(record)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Loaded(NamedTuple):
    """What a program has imported when it ends.

    files: of the project, relative to it. unprepared: modules of the project with types that the server has not
    prepared.
    """

    files: list[Path]
    unprepared: list[str]


def loaded(tmp_path: Path, program: str, *arguments: str) -> Loaded:
    """Run a program to its end."""
    out = tmp_path / "modules.json"
    ended = subprocess.run(
        [sys.executable, "-c", RECORD, str(ROOT), str(out), str(ROOT / program), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    imported, unprepared = json.loads(out.read_text())
    files = (Path(name) for name in imported if name.endswith(".py"))
    return Loaded(
        files=sorted(path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT)),
        unprepared=[name for name in unprepared if (ROOT / name.partition(".")[0]).is_dir()],
    )


USED = {"adapters", "alarms", "cpu", "curriculum", "dashboard", "doctor", "graders", "machine", "ranks"}
"""Attachments that the small run uses."""

DOORS = frozenset({"__init__.py", "attachment.py", "sections.py", "library.py"})
"""Modules by which an attachment is found. The others of an attachment are imported when it is used."""

DOOR_LINES = 250
"""Lines of the doors of one attachment, at most."""


def assert_few(files: list[Path], *, modules: int, lines: int) -> None:
    """Bound what is loaded outside of attachments. A bound that rises has a reason; one that falls is written down."""
    core = [file for file in files if file.parts[0] != "attachments"]
    assert len(core) <= modules
    assert sum(map(length, core)) <= lines


def length(file: Path) -> int:
    """Return the number of lines of a file of the project."""
    return len((ROOT / file).read_text(encoding="utf-8").splitlines())


def used_attachments(files: list[Path]) -> dict[str, int]:
    """Return the number of lines behind the doors of attachments, of those that loaded more than their doors."""
    attached = [file for file in files if file.parts[0] == "attachments" and len(file.parts) > 2]
    behind = Counter[str]()
    for file in attached:
        if file.name not in DOORS:
            behind[file.parts[1]] += length(file)
    return dict(behind)


def test_the_doors_of_an_attachment_are_small() -> None:
    """Every start imports them, used or not."""
    doors = Counter[str]()
    for file in (ROOT / "attachments").glob("*/*.py"):
        if file.name in DOORS:
            doors[file.parent.name] += length(file.relative_to(ROOT))
    assert {name: lines for name, lines in doors.items() if lines > DOOR_LINES} == {}


def test_the_help_loads_few_modules(tmp_path: Path) -> None:
    """It reads the configuration, and computes nothing."""
    files = loaded(tmp_path, "pipeline.py", "--help").files
    assert_few(files, modules=64, lines=9_300)
    assert used_attachments(files) == {}


def test_the_first_example_loads_few_modules(tmp_path: Path) -> None:
    """The library without what a supervised run adds. It reads few problems here."""
    data, example = tmp_path / "profiles" / "embedded", tmp_path / "examples" / "grpo.py"
    data.mkdir(parents=True)
    example.parent.mkdir()
    example.write_bytes((ROOT / "examples" / "grpo.py").read_bytes())
    for file in (ROOT / "profiles" / "embedded").iterdir():
        if file.suffix == ".jsonl":
            (data / file.name).write_text("\n".join(file.read_text(encoding="utf-8").splitlines()[:4]), "utf-8")
        else:
            (data / file.name).symlink_to(file)
    files = loaded(tmp_path, str(example), "0").files
    assert [file for file in files if file.parts[0] == "training_run"] == []
    assert_few(files, modules=115, lines=21_900)
    assert used_attachments(files).keys() == {"cpu", "graders"}


def test_a_run_loads_few_modules_and_handlers_when_they_are_requested(tmp_path: Path) -> None:
    """The server of a run that no client asks has the names of handlers only.

    No module with types is imported after the server has started: it prepares all types before threads decode them.
    """
    found = loaded(tmp_path, *SMALL_RUN)
    assert found.unprepared == []
    assert_few(found.files, modules=236, lines=41_450)
    used = used_attachments(found.files)
    assert used.keys() == USED
    assert sum(used.values()) <= 7_500
    files = {str(file) for file in found.files}
    handlers = {
        "attachments/adapters/routes_adapters.py",
        "attachments/dashboard/routes.py",
        "attachments/dialects/endpoints.py",
        "attachments/dialects/routes_control.py",
        "attachments/openapi/document.py",
        "attachments/remote/routes.py",
        "attachments/tools/chat.py",
        "clotho/serving/openai_routes.py",
    }
    assert all((ROOT / file).is_file() for file in handlers)
    assert files & handlers == set()
