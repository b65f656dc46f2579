"""`search`: coordinate search over settings, each tried once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import search
from bench.contenders import clotho_train
from bench.contenders.process import Contender
from bench.measurement import read


class ScriptedContender:
    """A contender whose cost is the distance of its learning rate from 2e-3; it fails at 1e-4."""

    semantics, versions = "Made up.", dict[str, str]()

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    def measure(self, case: Mapping[str, Any]) -> dict[str, float]:
        self.asked.append(case)
        rate = case["learning_rate"]
        cost = 1 + abs(rate - 2e-3)
        return {"processor_seconds": cost, "seconds": cost, "accuracy": 0.5 if rate == 1e-4 else 0.95}


def test_the_search_keeps_the_best_value_of_each_setting() -> None:
    """From any start, trying each combination once."""
    answers = ScriptedContender()
    subject = search.SUBJECTS["mlx-lm-lora"]
    looked = search.Search(answers, subject, 2, "command")  # type: ignore[arg-type]  # scripted_contender
    found = looked.descend(subject.starts[0])
    assert found["learning_rate"] == 2e-3
    assert len({str(case) for case in answers.asked}) * 2 - 1 == len(answers.asked)


def test_settings_that_fail_rank_last() -> None:
    """Their other seeds are not tried."""
    answers = ScriptedContender()
    subject = search.SUBJECTS["mlx-lm-lora"]
    looked = search.Search(answers, subject, 3, "command")  # type: ignore[arg-type]  # scripted_contender
    assert looked.cost(subject.starts[0] | {"learning_rate": 1e-4}) > search.LIMIT
    assert len(answers.asked) == 1
    assert [one.case["learning_rate"] for one in looked.measurements()] == [1e-4, 1e-4]


@contextmanager
def scripted_contender(contender: Contender) -> Iterator[ScriptedContender]:
    """Replaces the process."""
    yield ScriptedContender()


def test_a_search_replaces_only_the_results_of_its_contender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both contenders share one results file."""
    path = tmp_path / "search.jsonl"
    monkeypatch.setattr(search, "running", scripted_contender)
    for name in ("mlx-lm-lora", "clotho", "clotho"):
        assert search.main(["--of", name, "--seeds", "1", "--out", str(path)]) == 0
    found = [(one.contender, one.metric, one.command) for one in read(path)]
    assert found.count(("clotho", "seconds", "python -m bench search --of clotho")) == len(
        {str(one.case) for one in read(path) if one.contender == "clotho"}
    )
    assert ("mlx-lm-lora", "processor_seconds", "python -m bench search") in found


@pytest.mark.parametrize("subject", search.SUBJECTS.values(), ids=list(search.SUBJECTS))
def test_every_choice_is_a_setting_of_the_contender(subject: search.Subject) -> None:
    """A setting that no program reads would be searched without effect."""
    taken = {*clotho_train.OPTIONS, "profile"} if subject.contender.name == "clotho" else {*mlx_lm_lora_settings()}
    assert {key for settings in (*subject.starts, *sum(subject.choices, ())) for key in settings} <= taken


def mlx_lm_lora_settings() -> set[str]:
    """The keys of `BEST` in `mlx_lm_lora_train`, which needs the library to be imported."""
    program = Path(search.__file__).with_name("contenders") / "mlx_lm_lora_train.py"
    tree = ast.parse(program.read_text(encoding="utf-8"))
    assigned = {
        one.target.id: one.value
        for one in tree.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return set(ast.literal_eval(assigned["BEST"]))  # type: ignore[arg-type]  # an expression, as it is there
