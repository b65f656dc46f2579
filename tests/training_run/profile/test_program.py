"""The words that start the program, in printed commands."""

from __future__ import annotations

import sys

import pytest

from training_run.profile.program import program


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ("pipeline.py", "python pipeline.py"),
        ("../my clone/pipeline.py", "python '../my clone/pipeline.py'"),
        ("/home/user/.venv/bin/clotho", "clotho"),
        ("/home/user/clone/training_run/__main__.py", "clotho"),
        ("", "clotho"),
    ],
)
def test_printed_commands_start_the_program_as_the_user_did(
    started: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path stays as typed, so that the command works in the same directory."""
    monkeypatch.setattr(sys, "argv", [started, "--profile", "local-m3"])
    assert program() == words
