"""`python -m bench`: what may be asked, and what is said where it cannot be answered."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from bench.__main__ import QUESTIONS, main
from bench.contenders.process import MissingContendersError


def test_a_library_that_only_the_drawings_need_is_asked_for_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how to get it."""
    monkeypatch.setitem(sys.modules, "pyte", None)
    monkeypatch.delitem(sys.modules, "bench.screenshot", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench", "screenshot"])
    assert main() == 2
    assert capsys.readouterr().err == "bench: pyte is not installed: pip install -e '.[bench]'\n"


def test_contenders_that_are_not_installed_are_asked_for_on_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how to install them; no question needs to catch that itself."""

    def ask(_: list[str]) -> int:
        raise MissingContendersError("no contenders at .contenders/bin/python")

    monkeypatch.setitem(sys.modules, "bench.decode", SimpleNamespace(main=ask))
    monkeypatch.setattr(sys, "argv", ["bench", "decode"])
    assert main() == 2
    assert capsys.readouterr().err == "bench: no contenders at .contenders/bin/python\n"


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["nonsense"], 2)])
def test_without_a_question_the_list_of_them_is_shown(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question that there is not is a mistake."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert main() == status
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(QUESTIONS)
