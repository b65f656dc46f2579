"""docs/atropos.md: profiles load, commands are accepted, and named files exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from attachments.atropos.sections import ENVIRONMENTS
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from training_run.__main__ import main
from training_run.profile.load import PROFILES, load_profile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "atropos.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line)
    for language, block in BLOCKS
    if language == "sh"
    for line in block.replace("\\\n", " ").splitlines()
]
RUNS = [command[1:] for command in COMMANDS if command[0] == "clotho"]
NEEDS_ATROPOSLIB = pytest.mark.needs_extra("atroposlib")
INSTALLATION = "python3 -m venv .atropos && .atropos/bin/pip install atroposlib"


def command_of(program: str) -> list[str]:
    """Return the arguments of the command that contains this program."""
    (found,) = [command for command in COMMANDS if program in command]
    return found[found.index(program) + 1 :]


def flags(arguments: list[str]) -> list[str]:
    """Return the names of the flags."""
    return [argument for argument in arguments if argument.startswith("--")]


def test_the_profile_of_an_own_environment_loads(tmp_path: Path) -> None:
    """The TOML block is a complete profile."""
    (block,) = [block for language, block in BLOCKS if language == "toml"]
    (tmp_path / "mine.toml").write_text(block, encoding="utf-8")
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    (environment,) = ENVIRONMENTS.of(load_profile(str(tmp_path / "mine.toml")))
    assert environment.name == "mine"
    assert environment.script == str(tmp_path / "mine.py")


def test_the_profiles_and_scripts_of_the_page_exist() -> None:
    """The table of profiles names files of the project."""
    table = PAGE[PAGE.index("| Profile |") : PAGE.index("## Your own")]
    assert all((PROFILES / f"{name}.toml").is_file() for name in re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE))
    assert all((PROFILES / "environments" / name).is_file() for name in re.findall(r"`(\w+\.py)`", table))


def test_every_command_is_covered_by_a_test_below() -> None:
    """The installation needs a network; error messages of the program contain the same command."""
    others = [INSTALLATION.split(), *(command for command in COMMANDS if {"run-api", "gsm8k_server.py"} & {*command})]
    assert [command for command in COMMANDS if command[0] != "clotho" and command not in others] == []
    assert len(RUNS) == 3


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(run, marks=[NEEDS_ATROPOSLIB] if "atropos-local" in run else [], id=" ".join(run)) for run in RUNS],
)
def test_a_run_accepts_its_flags(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run loads the profile and the model, and estimates the memory."""
    model = str(ROOT / "profiles" / "embedded")
    python = ["--atropos.python", python_with_atropos()] if "atropos-local" in arguments else []
    given = [model if argument == "MODEL" else argument for argument in arguments]
    status = main([*given, *python, "--dry-run", "--run-dir", str(tmp_path / "run")])
    assert status == 0, capsys.readouterr().err


@NEEDS_ATROPOSLIB
def test_the_api_server_of_atroposlib_accepts_its_flags() -> None:
    """`run-api` is the console script of this module."""
    command = [python_with_atropos(), "-m", "atroposlib.cli.run_api", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [flag for flag in flags(command_of("run-api")) if flag not in text] == []


@NEEDS_ATROPOSLIB
def test_an_environment_accepts_its_flags() -> None:
    """All environments of atroposlib have the same flags."""
    script = str(PROFILES / "environments" / "question_answer.py")
    command = [python_with_atropos(), script, "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [flag for flag in flags(command_of("gsm8k_server.py")) if flag not in text] == []
