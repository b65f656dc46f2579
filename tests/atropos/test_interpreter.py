"""The interpreter of environments: looked at before a run depends on it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clotho.atropos.commands import find_interpreter, require_atroposlib, require_environments
from clotho.config.load import load_profile
from protocols.errors import ProfileError
from tests.atropos.counterpart import python_with_atropos


def program(path: Path, text: str) -> str:
    """An executable script."""
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def refusal(python: str) -> str:
    """The one line."""
    with pytest.raises(ProfileError) as caught:
        require_atroposlib(python)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_what_is_missing_is_said_with_the_command_that_helps(tmp_path: Path) -> None:
    """An interpreter that is not there, and one without atroposlib."""
    assert refusal(".nowhere/bin/python") == (
        "atropos.python: there is no .nowhere/bin/python; to make one: "
        "python3 -m venv .nowhere && .nowhere/bin/pip install atroposlib"
    )
    assert refusal("no-such-program").endswith("python3 -m venv .atropos && .atropos/bin/pip install atroposlib")
    lacking = program(tmp_path / "lacking", "exit 3")
    assert refusal(lacking) == f"atropos.python: {lacking} has no atroposlib: {lacking} -m pip install atroposlib"


def test_what_is_no_python_is_said(tmp_path: Path) -> None:
    """A file that cannot be run, one that is no program, and one that fails."""
    (tmp_path / "text").touch()
    assert refusal(str(tmp_path / "text")).endswith("is not a program that can be run")
    assert refusal(program(tmp_path / "fails", "exit 9")).endswith("is no Python that works: it ended with 9")
    (tmp_path / "text").write_bytes(b"\x7fELF, or not")
    (tmp_path / "text").chmod(0o755)
    assert "cannot be run: " in refusal(str(tmp_path / "text"))


def test_the_real_one_passes() -> None:
    """The one that the other tests use."""
    require_atroposlib(python_with_atropos())


def test_a_virtual_environments_python_stays_the_link_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it leads to is another Python, without the packages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert find_interpreter("bin/python") == str(tmp_path / "bin" / "python")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    assert find_interpreter("python") == str(tmp_path / "bin" / "python")


def test_a_script_must_be_there(tmp_path: Path) -> None:
    """Looked at before anything is loaded; a profile that starts nothing needs nothing."""
    python = program(tmp_path / "python", "exit 0")
    environments = [{"name": "mine", "script": str(tmp_path / "mine.py")}]
    profile = load_profile("atropos-local", {"atropos.python": python, "environments": environments})
    with pytest.raises(ProfileError, match=r"^environments: 'mine': there is no script .*mine.py$"):
        require_environments(profile)
    (tmp_path / "mine.py").touch()
    require_environments(profile)
    require_environments(load_profile("atropos"))
    require_environments(load_profile("local-m3"))
