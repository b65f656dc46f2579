"""`python -m bench reproduce`: a table of the documentation beside the one that is measured again."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import figures, reproduce
from bench.__main__ import module_of
from bench.fingerprint import ROOT
from bench.measurement import Measurement, read, write
from tests.bench.made_measurements import measurement

GENERATED = re.compile(r"<!-- (\w[\w-]*):begin -->.*?<!-- \1:end -->", re.DOTALL)
MEASURED = re.compile(r"^\|.*\d \([\d.,]+ to [\d.,]+\).*$", re.MULTILINE)
"""A row of a table with a median and its range."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark `made` whose stored rate is 1 and whose next one is the first value of the file `next`."""

    def measure(argv: Sequence[str]) -> int:
        values = [float((tmp_path / "next").read_text())]
        write(Path(argv[argv.index("--out") + 1]), [measurement(values)])
        return 0

    monkeypatch.setitem(sys.modules, "bench.made", SimpleNamespace(main=measure, read=read))
    monkeypatch.setattr(figures, "PAGES", {"made": "page.md"})
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce, "results_path", lambda name: tmp_path / f"{name}.jsonl")
    (tmp_path / "page.md").write_text("<!-- made:begin -->\nthe stored table\n<!-- made:end -->\n")
    write(tmp_path / "made.jsonl", [measurement([1.0])])
    return tmp_path


@pytest.mark.parametrize(("rate", "status"), [("1.0", 0), ("0.1", 1)])
def test_a_table_that_is_measured_again_is_compared_with_the_stored_one(
    rate: str, status: int, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stored results stay. A regression has exit status 1."""
    (made / "next").write_text(rate)
    before = (made / "made.jsonl").read_bytes()
    assert reproduce.main(["made", "--out", str(made / "new.jsonl")]) == status
    assert "the stored table" in capsys.readouterr().out
    assert (made / "made.jsonl").read_bytes() == before
    assert isinstance(read(made / "new.jsonl")[0], Measurement)


def test_a_quick_measurement_is_not_compared(made: Path) -> None:
    """Its cases are smaller than those of the table."""
    (made / "next").write_text("0.1")
    assert reproduce.main(["made", "--quick"]) == 0


def test_results_are_never_overwritten(made: Path) -> None:
    """A file that exists is refused with exit status 2, before anything is measured."""
    with pytest.raises(SystemExit) as refused:
        reproduce.main(["made", "--out", str(made / "made.jsonl")])
    assert refused.value.code == 2


def test_the_tables_of_the_documentation_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each: name and page."""
    assert reproduce.main([]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert listed == [[name, page] for name, page in sorted(figures.PAGES.items())]


@pytest.mark.parametrize("name", sorted(figures.PAGES))
def test_every_table_is_that_of_its_results_with_its_command(name: str) -> None:
    """The command is how a reader finds what to run. A chart stands above the table."""
    stored = reproduce.stored_table(name)
    if name not in reproduce.CALCULATED:
        question = import_module(module_of(name))
        assert stored.endswith(question.table(question.read()))
        assert f"`python -m bench {name}" in stored


@pytest.mark.parametrize("page", ["README.md", *sorted({figures.TABLES, "docs/benchmarks.md", figures.REPORT})])
def test_measured_numbers_stand_in_generated_tables(page: str) -> None:
    """A table with a number and its range stands between markers, so that a command repeats it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert MEASURED.search(text)
    assert MEASURED.findall(GENERATED.sub("", text)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(figures.PAGES))
def test_every_table_can_be_measured_again_in_its_quick_form(name: str, tmp_path: Path) -> None:
    """A benchmark whose contenders are not installed says so."""
    from bench.contenders.process import MissingContendersError

    try:
        assert reproduce.main([name, "--quick", "--out", str(tmp_path / "new.jsonl")]) == 0
    except MissingContendersError as missing:
        pytest.skip(str(missing))
