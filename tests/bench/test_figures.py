"""`python -m bench figures`: the text it writes, and its report of missing results."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import curriculum, environments, figures, methods, remote, soak
from bench.__main__ import BENCHMARKS
from bench.environments import EnvironmentRun, permutation_test
from bench.figures import measured
from bench.fingerprint import ROOT, fingerprint
from bench.learning import LearningRun
from bench.measurement import write
from bench.summary import summary
from bench.tables import report, side_by_side
from bench.trials import Outcome
from tests.bench.made_measurements import made_trial, measurement

HERE = fingerprint()
OUTCOME = Outcome(method=methods.DEFINITIONS.methods()[1], trials=(made_trial([0.3, 0.96]),))
TRAINED = EnvironmentRun(
    profile="atropos-two", seed=0, updates=6, before=None, after=None, seconds=30.0, rewards=[0.1, 0.2, 0.3] * 2,
    p_value=0.5, groups={"a": 10, "b": 30}, weights={"a": 1.0, "b": 3.0}, logprob_error=1e-7, command="",
    fingerprint=HERE,
)  # fmt: skip
TABLES = {
    "methods": methods.table([OUTCOME]),
    "environments": environments.table([TRAINED]),
}  # fmt: skip


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES.keys())
def test_every_row_of_a_table_has_a_cell_for_every_heading(text: str) -> None:
    """Markdown renders no table otherwise."""
    heading, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert set(rule) == set("|-:")
    assert rows
    assert {len(line.split("|")) for line in (rule, *rows)} == {len(heading.split("|"))}


def test_missing_results_are_named_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Benchmarks with results are written all the same."""
    page = tmp_path / "docs" / "numerics-internals.md"
    page.parent.mkdir()
    objectives = tmp_path / "docs" / "numerics.md"
    objectives.write_text("<!-- objectives:begin -->\nold\n<!-- objectives:end -->\n")
    monkeypatch.setattr(figures, "PAGE_ORDER", ())
    page.write_text("".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in TABLES))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "learning.jsonl")
    monkeypatch.setattr(methods, "draw", lambda *_: None)
    monkeypatch.setattr(methods, "read", lambda: [OUTCOME])
    for question in (environments, curriculum, soak, remote):
        monkeypatch.setattr(question, "read", list)
    assert figures.main([]) == 1
    assert capsys.readouterr().err == (
        "bench: no results, unchanged: learning, environments, curriculum, soak, remote (run python -m bench NAME)\n"
    )
    assert "0.960" in page.read_text()
    assert "old" not in objectives.read_text()
    assert page.read_text().count("\nold\n") == 1


def test_a_benchmark_has_its_table_and_its_chart_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark without a chart has only a table."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmark-tables.md"
    page.write_text("".join(f"<!-- {name}:begin --><!-- {name}:end -->\n" for name in ("sampled", "told")))
    results = [measurement([1.0])]
    asked = {"read": lambda: results, "table": report}
    sampled = SimpleNamespace(NAME="sampled", draw=lambda results, target: target.write_text("chart"), **asked)
    monkeypatch.setitem(sys.modules, "bench.sampled", sampled)
    monkeypatch.setitem(sys.modules, "bench.told", SimpleNamespace(NAME="told", **asked))
    monkeypatch.setattr(figures, "PAGES", ())
    monkeypatch.setattr(methods, "read", list)
    monkeypatch.setattr(figures, "PAGE_ORDER", ("sampled", "told"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "learning.jsonl")
    assert figures.main([]) == 1
    assert page.read_text().count(side_by_side(results, "rate")) == 2
    assert [path.name for path in tmp_path.glob("*.svg")] == ["sampled.svg"]
    assert page.read_text().count("](images/") == page.read_text().count("](images/sampled.svg)") == 1


def test_every_benchmark_of_the_page_is_listed_and_has_markers() -> None:
    """The markers have the name of the benchmark."""
    page = (ROOT / "docs" / figures.BENCHMARKS_PAGE).read_text(encoding="utf-8")
    for name in figures.PAGE_ORDER:
        question = import_module(f"bench.{name}")
        assert name == question.NAME
        assert name in BENCHMARKS
        assert f"<!-- {name}:begin -->" in page
        assert f"<!-- {name}:end -->" in page


def test_the_summary_has_the_median_ratio_to_each_peer(tmp_path: Path) -> None:
    """Rows without results are omitted."""
    assert summary(tmp_path) == ""
    found = [
        measurement(
            values, contender=who, metric="tokens_per_second", prompts=4, group=8, prompt_tokens=128, model="6m"
        )
        for who, values in (("mlx-lm", [1.0, 2.0, 3.0]), ("clotho", [2.0, 6.0, 9.0]))
    ]
    write(tmp_path / "decode.jsonl", found)
    rows = [line for line in summary(tmp_path).splitlines() if line.startswith("| rollouts")]
    assert len(rows) == 1
    assert "| mlx-lm | 3.00 (2.00 to 3.00) |" in rows[0]


def test_the_headlines_are_a_part_of_the_summary() -> None:
    """README.md has fewer rows than docs/benchmarks.md."""
    results = ROOT / "bench" / "results"
    headlines = set(summary(results, headlines=True).splitlines()[:-1])
    assert headlines < set(summary(results).splitlines())


def test_the_summary_compares_times_to_an_accuracy_seed_by_seed(tmp_path: Path) -> None:
    """Their results have one line per seed. A seed that the peer does not have is omitted."""
    found = [
        measurement([value], contender=who, metric="seconds", task="until 0.7", seed=seed)
        for who, values in (("mlx-lm-lora", [200.0, 300.0]), ("clotho", [50.0, 90.0, 10.0]))
        for seed, value in enumerate(values)
    ]
    write(tmp_path / "time_to_accuracy.jsonl", found)
    (row,) = [line for line in summary(tmp_path).splitlines() if line.startswith("| seconds until")]
    assert "| mlx-lm-lora | 0.28 (0.25 to 0.30) |" in row


def test_a_mode_without_results_has_no_column() -> None:
    """`python -m bench learning --modes async` is enough for a table."""
    run = LearningRun(
        mode="async", seed=0, steps=60, before=0.5, after=0.96, seconds=25.0, curve=[], swap_median=1e-4,
        swap_longest=2e-4, decode_rate_idle=10.0, decode_rate_learning=5.0, tokens=100, command="", fingerprint=HERE,
    )  # fmt: skip
    assert measured([run]).splitlines()[0] == "| | asynchronous |"


def test_the_largest_possible_difference_is_significant() -> None:
    """Ten values against ten larger ones: one split of 184,756. Equal values are not significant."""
    assert permutation_test([0.0] * 10, [1.0] * 10) < 1e-3
    assert permutation_test([0.5] * 10, [0.5] * 10) == 1.0
    assert permutation_test([1.0] * 10, [0.0] * 10) == 1.0
