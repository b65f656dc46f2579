"""`python -m bench`: its list, and its errors on one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from bench.__main__ import BENCHMARKS, STUDIES, main
from bench.contenders.process import MissingContendersError


def test_a_missing_optional_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line has the command that installs it."""
    monkeypatch.setitem(sys.modules, "pyte", None)
    monkeypatch.delitem(sys.modules, "bench.screenshot", raising=False)
    monkeypatch.setattr(sys, "argv", ["bench", "screenshot"])
    assert main() == 2
    assert capsys.readouterr().err == "bench: pyte is not installed: pip install -e '.[bench]'\n"


def test_missing_contenders_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Benchmarks do not handle the error themselves."""

    def ask(_: list[str]) -> int:
        raise MissingContendersError("no contenders at .contenders/bin/python")

    monkeypatch.setitem(sys.modules, "bench.decode", SimpleNamespace(main=ask))
    monkeypatch.setattr(sys, "argv", ["bench", "decode"])
    assert main() == 2
    assert capsys.readouterr().err == "bench: no contenders at .contenders/bin/python\n"


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["nonsense"], 2)])
def test_all_benchmarks_are_listed_without_a_name(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown name has exit status 2."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert main() == status
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*BENCHMARKS, *STUDIES]
