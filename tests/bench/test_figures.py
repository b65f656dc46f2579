"""`python -m bench figures`: the text it writes, and its report of missing results."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from bench import figures, summary
from bench.__main__ import BENCHMARKS, STUDIES, module_of
from bench.fingerprint import ROOT
from bench.measurement import write
from bench.studies import methods
from bench.summary import ON_LINUX, SAME_KERNELS, table
from bench.tables import report, side_by_side
from tests.bench.made_measurements import measurement


def test_a_benchmark_has_its_table_and_its_chart_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark without a chart has only a table. One without results is named, and its page stays as it is."""
    names, results = ("drawn", "told", "missing"), [measurement([1.0])]
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "tables.md"
    page.write_text("".join(f"<!-- {name}:begin -->stale<!-- {name}:end -->\n" for name in names))
    asked = {"read": lambda: results, "table": report}
    drawn = SimpleNamespace(NAME="drawn", draw=lambda results, target: target.write_text("chart"), **asked)
    monkeypatch.setitem(sys.modules, "bench.drawn", drawn)
    monkeypatch.setitem(sys.modules, "bench.told", SimpleNamespace(NAME="told", **asked))
    monkeypatch.setitem(sys.modules, "bench.missing", SimpleNamespace(NAME="missing", read=list))
    monkeypatch.setattr(methods, "read", list)
    monkeypatch.setattr(summary, "table", lambda *_, **__: "")
    monkeypatch.setattr(figures, "PAGES", dict.fromkeys(names, "docs/tables.md"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "IMAGES", tmp_path / "docs")
    assert figures.main([]) == 1
    text = page.read_text()
    assert text.count(side_by_side(results, "rate")) == 2
    assert text.count("](") == text.count("](drawn.svg)") == 1
    assert text.count("stale") == 1
    assert "missing" in capsys.readouterr().err


def test_every_benchmark_of_a_page_is_listed_and_has_markers() -> None:
    """The markers have the name of the benchmark."""
    for name, path in figures.PAGES.items():
        page = (ROOT / path).read_text(encoding="utf-8")
        assert name == import_module(module_of(name)).NAME
        assert name in (*BENCHMARKS, *STUDIES)
        assert f"<!-- {name}:begin -->" in page
        assert f"<!-- {name}:end -->" in page


def test_the_summary_has_the_median_ratio_to_each_peer(tmp_path: Path) -> None:
    """Rows without results are omitted."""
    assert table(tmp_path, ON_LINUX) == ""
    found = [
        measurement(
            values, contender=who, metric="tokens_per_second", prompts=4, group=8, prompt_tokens=128, model="6m"
        )
        for who, values in (("mlx-lm", [1.0, 2.0, 3.0]), ("clotho", [2.0, 6.0, 9.0]))
    ]
    adapted = [replace(one, case=one.case | {"adapter": "rank 8"}, values=[1.0]) for one in found]
    write(tmp_path / "decode.jsonl", [*adapted, *found])
    rows = [line for line in table(tmp_path, ON_LINUX).splitlines() if line.startswith("| rollouts")]
    assert len(rows) == 1
    assert "| mlx-lm | 3.00 (2.00 to 3.00) |" in rows[0]


def test_the_headlines_are_a_part_of_the_summary() -> None:
    """README.md has fewer rows than docs/benchmarks.md."""
    results = ROOT / "bench" / "results"
    headlines = set(table(results, ON_LINUX, headlines=True).splitlines()[:-1])
    assert headlines < set(table(results, ON_LINUX).splitlines())


def test_every_row_of_the_summaries_was_measured() -> None:
    """A row whose case a benchmark no longer has would vanish."""
    for lines in (SAME_KERNELS, ON_LINUX):
        rows = table(ROOT / "bench" / "results", lines).splitlines()
        assert sum(" | `python -m bench " in row for row in rows) == len(lines)


def test_the_summary_compares_times_to_an_accuracy_seed_by_seed(tmp_path: Path) -> None:
    """Their results have one line per seed. A seed that the peer does not have is omitted."""
    found = [
        measurement([value], contender=who, metric="seconds", task="until 0.7", seed=seed)
        for who, values in (("mlx-lm-lora", [200.0, 300.0]), ("clotho", [50.0, 90.0, 10.0]))
        for seed, value in enumerate(values)
    ]
    write(tmp_path / "peers.jsonl", found)
    (row,) = [line for line in table(tmp_path, ON_LINUX).splitlines() if line.startswith("| seconds until")]
    assert "| mlx-lm-lora | 0.28 (0.25 to 0.30) |" in row
