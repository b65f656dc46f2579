"""Every attachment can be deleted with its folder: what is left trains and serves, and names what it lacks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clotho.rewards.registry import REWARDS
from clotho.training.advantages import ATTACHED as ADVANTAGES
from clotho.training.objectives.functions import ATTACHED as OBJECTIVES
from training_run.profile.mounted import ATTACHED

ROOT = Path(__file__).parents[1]
PROGRAM = ("actors", "attachments", "clotho", "profiles", "protocols", "training_run", "pipeline.py")
ATTACHMENTS = sorted(path.parent.name for path in (ROOT / "attachments").glob("*/__init__.py"))
UNUSED = shutil.ignore_patterns("__pycache__", "tests")
REWARD = """
import json, pathlib, urllib.error, urllib.request

def status(path):
    try:
        with urllib.request.urlopen("http://127.0.0.1:PORT" + path) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code

def length(problem, completion):
    file = pathlib.Path("statuses.json")
    if not file.exists():
        file.write_text(json.dumps({path: status(path) for path in ("/", "/metrics", "/openapi.json", "/v1/models")}))
    return len(completion) % 3
"""

PROGRAM_OF_COPY = """
import importlib.util, runpy, sys
sys.meta_path = [one for one in sys.meta_path if "__editable__" not in getattr(one, "__module__", "")]
assert importlib.util.find_spec("attachments.{absent}") is None
sys.argv = {argv!r}
runpy.run_path("pipeline.py", run_name="__main__")
"""
"""Runs the program without what an editable installation adds, which would find the folder in the whole tree."""

pytestmark = pytest.mark.slow  # a copy of the tree and a run for each attachment


class Copy:
    """A copy of the program without one attachment. statuses: HTTP statuses of pages that its run has answered."""

    def __init__(self, directory: Path, absent: str) -> None:
        self.path, self.absent = directory, absent
        for name in PROGRAM:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=UNUSED)
            else:
                shutil.copy(ROOT / name, directory / name)
        shutil.rmtree(directory / "attachments" / absent)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the program of the copy."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        line = [sys.executable, "-c", PROGRAM_OF_COPY.format(absent=self.absent, argv=["pipeline.py", *arguments])]
        return subprocess.run(line, cwd=self.path, env=environment, capture_output=True, text=True, timeout=300)

    def train(self) -> tuple[subprocess.CompletedProcess[str], dict[str, int]]:
        """Train one step, with a reward that reads pages of the run's server."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        (self.path / "probe.py").write_text(REWARD.replace("PORT", port), encoding="utf-8")
        small = (
            "--steps 1 --eval off --learner.batch-size 4 --sampling.group-size 4 --rewards probe:length --run-dir run"
        )
        ended = self.run("--profile", "local-m3", *small.split(), "--server.port", port)
        statuses = self.path / "statuses.json"
        return ended, json.loads(statuses.read_text()) if statuses.exists() else {}


@pytest.mark.parametrize("absent", ATTACHMENTS)
def test_a_tree_without_an_attachment_trains_serves_and_refuses_what_it_lacks_by_name(
    absent: str, tmp_path: Path
) -> None:
    """Help, a run with its display and its server, the library, and each key and name of the attachment."""
    copy = Copy(tmp_path / "copy", absent)
    helped = copy.run("--help")
    assert helped.returncode == 0, helped.stderr
    ended, statuses = copy.train()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (copy.path / "run" / "adapters" / "adapters.safetensors").is_file()
    missing = {"dashboard": "/", "openapi": "/openapi.json"}.get(absent)
    assert statuses == {
        path: 404 if path == missing else 200 for path in ("/", "/metrics", "/openapi.json", "/v1/models")
    }
    for key in [key for key, owner in ATTACHED.items() if owner == absent]:
        refused = copy.run("--dry-run", f"--{key.replace('_', '-')}", "x")
        assert refused.returncode == 2, (key, refused.stdout)
        assert f"'{absent}'" in refused.stderr, key
    owners = {
        "--rewards": REWARDS.owners,
        "--learner.objective": OBJECTIVES.owners,
        "--learner.objective.advantage": ADVANTAGES.owners,
    }
    for flag, names in owners.items():
        for name in [name for name, owner in names.items() if owner == absent]:
            refused = copy.run("--dry-run", flag, name)
            assert refused.returncode == 2, name
            assert f"'{absent}'" in refused.stderr, name
