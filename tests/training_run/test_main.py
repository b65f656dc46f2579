"""The command line answers questions and reports mistakes before it imports MLX."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from clotho import extension
from training_run.__main__ import main
from training_run.main import main as run
from training_run.profile.aliases import COMMANDS

ROOT = Path(__file__).parents[2]
HEAVY = {"mlx_lm", "transformers", "starlette", "training_run.start.startup"}


ANSWERED = {
    ("--help",): 0,
    ("--help", "learner"): 0,
    ("--help-all",): 0,
    ("--stepps", "3"): 2,
    ("--steps", "0"): 2,
    ("--profile", "local-m4"): 2,
    ("--run-dir", str(ROOT / "docs")): 2,
    ("--resume", "--run-dir", str(ROOT / "no_such_run")): 2,
}
"""Flags whose answer needs no model, and the exit status."""

ANSWERS = """
import json, runpy, sys

found = []
for flags in json.loads(sys.argv[1]):
    sys.argv = ["pipeline.py", *flags]
    try:
        runpy.run_path("pipeline.py", run_name="__main__")
    except SystemExit as end:
        found.append((end.code, sorted(sys.modules)))
open(sys.stdout.fileno(), "w").write("\\n" + json.dumps(found))
"""
"""Starts the program with one list of flags after the other; prints the exit status and the modules of each."""


def test_answers_without_a_model_precede_the_imports_of_a_run() -> None:
    """Flags, profile and run directory are checked first, because the imports take ten times as long."""
    command = [sys.executable, "-c", ANSWERS, json.dumps(list(ANSWERED))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert [status for status, _ in found] == list(ANSWERED.values())
    assert all("training_run.profile.flags" in imported and not HEAVY & {*imported} for _, imported in found)
    assert ended.stderr.count("clotho: ") == sum(map(bool, ANSWERED.values()))


@pytest.mark.parametrize("entries", [[], [".lock", ".run_id"]], ids=["empty", "no files of a run"])
def test_a_directory_without_a_run_is_not_resumed(
    entries: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names the nearest run beside the directory, and the directory keeps its entries."""
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "profile.toml").touch()
    (tmp_path / "run-2").mkdir()
    for entry in entries:
        (tmp_path / "run-2" / entry).touch()
    assert main(["--resume", "--run-dir", str(tmp_path / "run-2"), "--server.port", "0"]) == 2
    assert f"did you mean {tmp_path / 'run-1'}?" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run-2").iterdir()) == entries


@pytest.mark.parametrize("flags", [["--dry-run"], []], ids=["dry run", "run"])
def test_environments_that_cannot_fill_a_batch_are_refused_before_the_run(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run checks group sizes too, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    environments = "[{name = 'e', script = 'e.py', group_size = 256}]"
    assert main(["--profile", "atropos-local", "--environments", environments, *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("clotho: environments: ")
    assert "group_size" in output.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("word", "own"), COMMANDS.items())
def test_a_command_of_mlx_lm_has_the_name_that_it_has_there(
    word: str, own: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line on standard error has the own name."""
    assert main([own, "--help"]) == 0
    help_text, _ = capfd.readouterr()
    assert f"clotho {own}" in help_text
    assert main([word, "--help"]) == 0
    assert capfd.readouterr() == (help_text, f"clotho: in the words of Clotho: {own}\n")


def test_the_installed_command_is_the_same_program() -> None:
    """`clotho` and `python pipeline.py` behave alike."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert EntryPoint("clotho", scripts["clotho"], "console_scripts").load() is main


def test_a_foreign_module_that_hides_ours_ends_the_command_with_one_line(tmp_path: Path) -> None:
    """Before anything else is imported, and before the standard streams are taken over."""
    (tmp_path / "protocols.py").touch()
    code = "import sys; from training_run.__main__ import main; sys.exit(main())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", code, "--steps", "1"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert str(tmp_path / "protocols.py") in line


def test_a_process_that_was_launched_beside_the_run_is_that_of_an_attachment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is that of the first attachment that knows what to do in it."""
    folders = {str(status): SimpleNamespace(launch=lambda _, status=status: status) for status in (None, 3, 4)}
    monkeypatch.setattr(extension, "attachment_modules", lambda _: folders)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--profile", "local-m3"])
    monkeypatch.setenv("MLX_RANK", "1")
    assert main() == 3


def test_garbage_collection_is_off_only_during_the_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is on again in every case."""
    assert main(["--model", "/no/such/model", "--run-dir", str(tmp_path / "run"), "--server.port", "0"]) == 2
    assert "/no/such/model" in capsys.readouterr().err
    assert gc.isenabled()


@pytest.mark.parametrize(("display", "line"), [("plain", "loading  profiles/embedded ...\n"), ("none", "")])
def test_a_run_says_what_it_loads_before_the_imports(
    display: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The imports and the model take seconds, in which the terminal is not empty; `none` writes nothing."""
    shown = []

    def interrupted() -> NoReturn:
        shown.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.chdir(ROOT)
    assert run(["--run-dir", str(tmp_path / "run"), "--monitor.display", display], load_train=interrupted) == 130
    assert shown == [line]
