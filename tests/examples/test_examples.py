"""The examples run as they are, with few problems and few steps."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import clotho
from protocols.prompt import Problem

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGUMENTS = {
    "grpo.py": ("2",),
    "async_grpo.py": ("1", "0"),
    "custom_loss.py": ("1",),
    "serve_while_training.py": ("1", "0"),
}


def run(name: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Run an example in this process, in a directory of its own."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(directory)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_has_its_arguments() -> None:
    """An example that is added is tested."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == ARGUMENTS.keys()


def test_the_first_example_fits_on_a_screen() -> None:
    """Whoever reads it has read all of GRPO."""
    assert len((EXAMPLES / "grpo.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints one line for each step."""
    read = clotho.problems

    def few(path: str) -> list[Problem]:
        return read(path)[:16]

    monkeypatch.setattr(clotho, "problems", few)
    run(name, ARGUMENTS[name], monkeypatch, tmp_path)
    steps = int(ARGUMENTS[name][0])
    assert len(re.findall(r"^(?:step|version) ", capsys.readouterr().out, re.MULTILINE)) == steps


@pytest.mark.slow
def test_the_first_example_learns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out accuracy rises from about 0.53 to at least 0.90, and the adapter is on disk."""
    run("grpo.py", (), monkeypatch, tmp_path)
    before, after = map(float, re.findall(r"^(?:before|after): ([\d.]+)", capsys.readouterr().out, re.MULTILINE))
    assert before < 0.65
    assert after >= 0.90
    assert (tmp_path / "adapter" / "adapters.safetensors").is_file()
