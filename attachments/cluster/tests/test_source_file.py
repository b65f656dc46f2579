"""The file of a reward function that is copied to the machines of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from attachments.cluster.reward_worker import source_file


def test_the_file_of_a_function_is_known_where_it_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files by path, and modules of the current directory; neither built-in functions nor installed packages."""
    (tmp_path / "rewards_of_mine.py").write_text("def one(problem, completion): ...")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert source_file("other/mine.py:one") == Path("other/mine.py")
    assert source_file("rewards_of_mine:one") == tmp_path / "rewards_of_mine.py"
    assert [
        source_file(name) for name in ("exact", "package:one", "msgspec:one", "absent:one", "package.module:one")
    ] == ([None] * 5)
