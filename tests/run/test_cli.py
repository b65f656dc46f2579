"""The command line: who only asks, or has made a mistake, does not wait for what training takes."""

from __future__ import annotations

import gc
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from clotho.__main__ import main

ROOT = Path(__file__).parents[2]
HEAVY = {"mlx_lm", "transformers", "starlette", "clotho.run.startup"}


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (["--help"], 0),
        (["--help", "learner"], 0),
        (["--help-all"], 0),
        (["--stepps", "3"], 2),
        (["--steps", "0"], 2),
        (["--profile", "local-m4"], 2),
        (["--run-dir", str(ROOT / "docs")], 2),
        (["--resume", "--run-dir", str(ROOT / "no_such_run")], 2),
    ],
)
def test_an_answer_that_needs_no_model_comes_before_the_imports_of_a_run(flags: list[str], status: int) -> None:
    """They take ten times as long as all the rest: flags, profile and run directory come first."""
    command = [sys.executable, "-X", "importtime", "pipeline.py", *flags]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    lines = ended.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert ended.returncode == status
    assert "clotho.config.flags" in imported
    assert imported & HEAVY == set()
    assert status == 0 or "clotho: " in ended.stderr


def test_the_installed_command_is_the_same_program() -> None:
    """`clotho` answers as fast as `python pipeline.py`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert EntryPoint("clotho", scripts["clotho"], "console_scripts").load() is main


def test_garbage_is_collected_again_once_everything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Collection rests during the imports alone, however the run goes on."""
    assert main(["--model", "/no/such/model", "--run-dir", str(tmp_path / "run"), "--server.port", "0"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
    assert gc.isenabled()
