"""What `python -m bench figures` writes, and what it says where nothing was measured yet."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import collapse, environments, figures, head, objectives
from bench.__main__ import QUESTIONS
from bench.collapse import Collapse
from bench.environments import Trained, permutation_test
from bench.figures import measured
from bench.fingerprint import ROOT, fingerprint
from bench.head import HeadCost
from bench.learning import Learnt
from bench.measurement import write
from bench.objectives import Outcome
from bench.summary import summary
from bench.tables import report, side_by_side
from tests.bench.measured import measurement

HERE = fingerprint()
COLLAPSE = Collapse(
    rate=2e-3, seed=0, before=0.5, tripped=None, sign="", best=0.6, at_alarm=0.6, lowest=0.1, final=0.1, saved=0.9,
    rollbacks=2, commands=[], fingerprint=HERE,
)  # fmt: skip
HEAD = HeadCost(
    vocabulary=151_936, tokens=512, width=256, plain_seconds=2.0, seconds=2.0, time_ratios=[1.0, 1.1],
    plain_bytes=10**10, bytes=10**9, command="", fingerprint=HERE,
)  # fmt: skip
OUTCOME = Outcome(
    objective="dapo", seed=1, before=0.5, after=0.96, updates=60, groups=900, discarded=60, seconds=25.0, command="",
    fingerprint=HERE,
)  # fmt: skip
TRAINED = Trained(
    profile="atropos-two", seed=0, updates=6, before=None, after=None, seconds=30.0, rewards=[0.1, 0.2, 0.3] * 2,
    p_value=0.5, groups={"a": 10, "b": 30}, weights={"a": 1.0, "b": 3.0}, logprob_error=1e-7, command="",
    fingerprint=HERE,
)  # fmt: skip
TABLES = {
    "collapse": collapse.table([COLLAPSE]), "head": head.table([HEAD]), "objectives": objectives.table([OUTCOME]),
    "environments": environments.table([TRAINED]),
}  # fmt: skip


@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES.keys())
def test_every_row_of_a_table_has_a_cell_for_every_heading(text: str) -> None:
    """Otherwise Markdown shows no table."""
    heading, rule, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert set(rule) == set("|-:")
    assert rows
    assert {len(line.split("|")) for line in (rule, *rows)} == {len(heading.split("|"))}


def test_what_was_not_measured_yet_is_left_and_named_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what was measured is written all the same."""
    page = tmp_path / "docs" / "numerics.md"
    page.parent.mkdir()
    monkeypatch.setattr(figures, "MEASURED", ())
    page.write_text("".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in TABLES))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "learning.jsonl")
    for question, results in ((objectives, [OUTCOME]), (head, []), (collapse, []), (environments, [])):
        monkeypatch.setattr(question, "read", lambda results=results: results)
    assert figures.main([]) == 1
    assert capsys.readouterr().err == (
        "bench: no results yet, left as it was: learning, head, collapse, environments (python -m bench NAME)\n"
    )
    assert "0.960" in page.read_text()
    assert page.read_text().count("\nold\n") == 3


def test_a_measured_question_has_its_table_on_the_page_of_benchmarks_and_its_chart_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question that draws nothing has a table only."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text("".join(f"<!-- {name}:begin --><!-- {name}:end -->\n" for name in ("sampled", "told")))
    results = [measurement([1.0])]
    asked = {"read": lambda: results, "table": report}
    sampled = SimpleNamespace(NAME="sampled", draw=lambda results, target: target.write_text("chart"), **asked)
    monkeypatch.setitem(sys.modules, "bench.sampled", sampled)
    monkeypatch.setitem(sys.modules, "bench.told", SimpleNamespace(NAME="told", **asked))
    monkeypatch.setattr(figures, "PAGES", ())
    monkeypatch.setattr(figures, "MEASURED", ("sampled", "told"))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "IMAGES", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "learning.jsonl")
    assert figures.main([]) == 1
    assert page.read_text().count(side_by_side(results, "rate")) == 2
    assert [path.name for path in tmp_path.glob("*.svg")] == ["sampled.svg"]
    assert page.read_text().count("](images/") == page.read_text().count("](images/sampled.svg)") == 1


def test_every_measured_question_is_listed_and_has_its_place_on_the_page() -> None:
    """Between marks of its name."""
    page = (ROOT / "docs" / figures.BENCHMARKS).read_text(encoding="utf-8")
    for name in figures.MEASURED:
        question = import_module(f"bench.{name}")
        assert name == question.NAME
        assert name in QUESTIONS
        assert f"<!-- {name}:begin -->" in page
        assert f"<!-- {name}:end -->" in page


def test_the_front_page_says_the_middle_ratio_to_each_peer(tmp_path: Path) -> None:
    """Of the pairs of the first case that fits; what was not measured has no row."""
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


def test_a_mode_that_was_not_measured_has_no_column() -> None:
    """`python -m bench learning --modes async` is enough for a table."""
    run = Learnt(
        mode="async", seed=0, steps=60, before=0.5, after=0.96, seconds=25.0, curve=[], swap_median=1e-4,
        swap_longest=2e-4, decode_rate_idle=10.0, decode_rate_learning=5.0, tokens=100, command="", fingerprint=HERE,
    )  # fmt: skip
    assert measured([run]).splitlines()[0] == "| | asynchronous |"


def test_a_difference_as_large_as_the_largest_possible_is_significant() -> None:
    """Of ten values against ten, all larger: one division in 184,756; and none where nothing differs."""
    assert permutation_test([0.0] * 10, [1.0] * 10) < 1e-3
    assert permutation_test([0.5] * 10, [0.5] * 10) == 1.0
    assert permutation_test([1.0] * 10, [0.0] * 10) == 1.0
