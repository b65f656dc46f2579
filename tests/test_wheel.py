"""The wheel trains in any folder, also beside modules with the names of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = (
    "actors", "attachments", "clotho", "profiles", "protocols", "training_run", "pipeline.py", "pyproject.toml",
    "README.md", "LICENSE",
)  # fmt: skip
FOREIGN = 'raise RuntimeError("not of this project")\n'

pytestmark = pytest.mark.slow  # the wheel is built from a copy of the tree


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    target = ["--target", str(directory / "installed")]
    subprocess.run([*pip, "install", "-q", "--no-deps", *target, str(source)], check=True)
    return directory / "installed"


@pytest.fixture(params=["empty", "foreign"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder, and one with modules of the same names."""
    if request.param == "foreign":
        for name in ("pipeline.py", "protocols.py", "actors/__init__.py", "attachments/__init__.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(FOREIGN, encoding="utf-8")
    return tmp_path


def test_the_installed_command_trains(installed: Path, folder: Path) -> None:
    """Its own modules are found first; modules of the folder, such as reward functions, come behind them."""
    command = [sys.executable, str(installed / "bin" / "clotho"), "--steps", "2", "--server", "off"]
    ended = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(installed)}, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    assert (folder / "runs" / "local-m3" / "adapters" / "adapters.safetensors").is_file()


def test_a_wheel_has_no_tests(installed: Path) -> None:
    """Those of attachments are left out."""
    assert list(installed.glob("attachments/*/tests")) == []
    assert not (installed / "tests").exists()
