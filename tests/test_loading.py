"""What a start loads: modules of the project, each of which costs time at every start and a file to read.

Handlers of requests, attachments that a run does not use, and commands are imported when they are used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SMALL_RUN = (
    "pipeline.py", "--profile", "local-m3", "--steps", "1", "--learner.batch-size", "2", "--sampling.group-size", "4",
    "--sampling.max-tokens", "8", "--eval", "off", "--server.port", "0",
    "--run-dir", "run",
)  # fmt: skip
RECORD = """
import atexit, json, runpy, sys

def record():
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    open(out, "w").write(json.dumps(sorted(files)))

root, out, *sys.argv = sys.argv[1:]
sys.path.insert(0, root)
atexit.register(record)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def loaded(tmp_path: Path, program: str, *arguments: str) -> list[Path]:
    """Return the files of the project that a program has imported when it ends, relative to the project."""
    out = tmp_path / "modules.json"
    ended = subprocess.run(
        [sys.executable, "-c", RECORD, str(ROOT), str(out), str(ROOT / program), *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    files = (Path(name) for name in json.loads(out.read_text()) if name.endswith(".py"))
    return sorted(path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT))


@pytest.mark.parametrize(
    ("command", "modules", "lines"),
    [
        (SMALL_RUN, 353, 51_500),
        (("pipeline.py", "--help"), 125, 12_500),
        (("examples/grpo.py", "0"), 222, 30_500),
    ],
    ids=["run", "help", "example"],
)
def test_a_start_loads_few_modules(tmp_path: Path, command: tuple[str, ...], modules: int, lines: int) -> None:
    """A bound that rises has a reason; one that falls is written down."""
    files = loaded(tmp_path, *command)
    assert len(files) <= modules
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) <= lines


def test_a_run_imports_handlers_when_they_are_requested(tmp_path: Path) -> None:
    """The server of a run that no client asks has their names only."""
    files = {str(file) for file in loaded(tmp_path, *SMALL_RUN)}
    handlers = {
        "attachments/adapters/routes_adapters.py",
        "attachments/dashboard/routes.py",
        "attachments/dialects/endpoints.py",
        "attachments/dialects/routes_control.py",
        "attachments/remote/routes.py",
        "attachments/tools/chat.py",
        "clotho/serving/openai_routes.py",
    }
    assert all((ROOT / file).is_file() for file in handlers)
    assert files & handlers == set()
