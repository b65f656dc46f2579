"""The distribution: what is built from a copy of the tree trains where it is installed, in any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("actors", "attachments", "clotho", "profiles", "protocols", "training_run")
FILES = ("pipeline.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
UNBUILT = shutil.ignore_patterns("__pycache__", "*.egg-info", "node_modules")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
FOREIGN = 'raise RuntimeError("not of this project")\n'
REWARD = "def reward(problem, completion):\n    return 1.0\n"
LOSS = """\
from clotho.training.objectives.contract import PolicyLoss


def negative(logp_N, tokens, settings):
    return PolicyLoss(-logp_N * tokens.advantage_N, clipped_N=logp_N * 0)
"""

pytestmark = pytest.mark.slow  # builds twice, and installs the builder


class Built:
    """A source distribution of the tree, the wheel that is built from it, and an environment with that wheel."""

    def __init__(self, directory: Path) -> None:
        source, built = directory / "source", directory / "built"
        for name in (*PACKAGES, "examples", *FILES):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=UNBUILT)
            else:
                source.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, source / name)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        subprocess.run([sys.executable, "-m", "venv", directory / "builder"], check=True)
        builder = str(directory / "builder" / "bin" / "python")
        pip = [builder, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", *project["build-system"]["requires"]], check=True)
        subprocess.run([builder, "-c", BUILD, built], cwd=source, check=True, stdout=subprocess.DEVNULL)
        (self.sdist,) = built.glob("*.tar.gz")
        wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(self.sdist)]
        subprocess.run(wheel, check=True)
        (self.wheel,) = built.glob("*.whl")
        self.environment = directory / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.environment], check=True)
        python = str(self.environment / "bin" / "python")
        install = ["--python", python, "install", "--no-deps", "--no-index", str(self.wheel)]
        subprocess.run([*pip, *install], check=True)
        (packages,) = self.environment.glob("lib/python*/site-packages")
        dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")

    def run(self, folder: Path, *command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in a folder. path: value of `PYTHONPATH`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        program = [str(self.environment / "bin" / command[0]), *command[1:]]
        return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """One build for all tests."""
    return Built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(params=["empty", "foreign"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An empty folder, and one with modules of the same names."""
    if request.param == "foreign":
        for name in (
            "pipeline.py",
            "protocols.py",
            "actors/__init__.py",
            "attachments/__init__.py",
            "clotho/__init__.py",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(FOREIGN, encoding="utf-8")
    return tmp_path


def test_the_installed_command_trains(built: Built, folder: Path) -> None:
    """Its own modules are found first: the folder is searched after the installed packages."""
    ended = built.run(folder, "clotho", "--profile", "local-m3", "--steps", "1", "--server.port", "0")
    assert ended.returncode == 0, ended.stderr
    assert (folder / "runs" / "local-m3" / "adapters" / "adapters.safetensors").is_file()


def test_functions_in_the_working_directory_are_found(built: Built, folder: Path) -> None:
    """Rewards and objectives that a profile names as `module:name`."""
    (folder / "my_rewards.py").write_text(REWARD, encoding="utf-8")
    (folder / "my_losses.py").write_text(LOSS, encoding="utf-8")
    mine = ["--rewards", "my_rewards:reward", "--learner.objective", "custom"]
    mine += ["--learner.objective.function", "my_losses:negative"]
    ended = built.run(folder, "clotho", "--dry-run", *mine)
    assert ended.returncode == 0, ended.stderr


def test_a_foreign_package_that_hides_the_messages_is_named_in_one_line(built: Built, tmp_path: Path) -> None:
    """It comes before the installed packages, for example by `PYTHONPATH`."""
    foreign = tmp_path / "foreign" / "protocols" / "__init__.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text(FOREIGN, encoding="utf-8")
    for command in (["clotho", "--steps", "1"], ["clotho", "--help"], ["python", "-c", "import clotho"]):
        ended = built.run(tmp_path, *command, path=tmp_path / "foreign")
        assert ended.returncode == 1, command
        assert str(foreign) in ended.stderr.splitlines()[-1]
        assert len(ended.stderr.splitlines()) == 1 or command[0] == "python"
    assert not (tmp_path / "runs").exists()


def test_a_wheel_has_every_file_of_the_packages_but_tests(built: Built) -> None:
    """Modules, profiles with their models and problems, the page of the dashboard, templates."""
    files = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and "tests" not in path.parts
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == files | {"pipeline.py"}


def test_a_source_distribution_has_the_examples(built: Built) -> None:
    """The README names them; in a wheel they would be modules of nobody."""
    with tarfile.open(built.sdist) as sdist:
        found = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")} <= found
    assert "CHANGELOG.md" in found
