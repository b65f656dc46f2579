"""Modules that a profile names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clotho.user_code import import_user_module


@pytest.mark.parametrize("path", [[], [""]], ids=["the command clotho", "python -m"])
def test_a_module_in_the_working_directory_is_found(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the installed command, whose `sys.path` lacks that directory. It comes behind installed modules."""
    name = f"rewards_of_{'_'.join(path)}_mine"
    (tmp_path / f"{name}.py").write_text("reward = 3\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", path + [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    try:
        assert import_user_module(name).reward == 3
        assert sys.path.count(str(tmp_path)) == (0 if path else 1)
        assert path or sys.path[-1] == str(tmp_path)
    finally:
        sys.modules.pop(name, None)


def test_a_module_that_does_not_exist_raises_what_its_import_raises() -> None:
    """The caller says where the profile names it."""
    with pytest.raises(ModuleNotFoundError, match="no_module_of_this_name"):
        import_user_module("no_module_of_this_name")
