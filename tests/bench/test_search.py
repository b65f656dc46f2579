"""`search`: coordinate search over settings, each tried once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.contenders import clotho_train
from bench.contenders.process import Contender
from bench.measurement import read
from bench.studies import search


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


def looking(answers: ScriptedContender, name: str) -> search.Search:
    """A search with a scripted contender."""
    return search.Search(answers, search.SUBJECTS[name])  # type: ignore[arg-type]  # scripted


def test_settings_that_fail_rank_last() -> None:
    """However long they took, by accuracy, and behind all that reach the target."""
    cheap, learned, reached = (
        {"seconds": seconds, "accuracy": accuracy} for seconds, accuracy in ((1.0, 0.1), (9.0, 0.6), (9.9, 0.9))
    )
    costs = [search.cost_of(run, "seconds") for run in (reached, learned, cheap)]
    assert costs == sorted(costs)
    assert costs[0] == 9.9
    assert costs[1] > search.LIMIT


@contextmanager
def scripted_contender(contender: Contender) -> Iterator[ScriptedContender]:
    """Replaces the process."""
    yield ScriptedContender()


def test_a_search_replaces_only_the_results_of_its_contender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All contenders share one results file."""
    path = tmp_path / "search.jsonl"
    monkeypatch.setattr(search, "running", scripted_contender)
    for name in ("mlx-lm-lora", "clotho", "clotho"):
        assert search.main(["--of", name, "--out", str(path)]) == 0
    found = [(one.contender, one.metric) for one in read(path)]
    assert found.count(("clotho", "seconds")) == search.BUDGET
    assert ("mlx-lm-lora", "processor_seconds") in found


def test_a_search_that_was_stopped_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings are stored as soon as they are tried, and are not tried again."""
    path = tmp_path / "search.jsonl"
    command = ["--of", "trl", "--resume", "--out", str(path)]
    answers = ScriptedContender()
    stopped = iter([*[None] * 5, KeyboardInterrupt])
    measure = answers.measure

    def interrupted(case: Mapping[str, Any]) -> dict[str, float]:
        if (stop := next(stopped, None)) is not None:
            raise stop
        return measure(case)

    monkeypatch.setattr(answers, "measure", interrupted)
    monkeypatch.setattr(search, "running", lambda contender: nullcontext(answers))
    with pytest.raises(KeyboardInterrupt):
        search.main(command)
    assert len(read(path)) == 2 * 5
    assert search.main(command) == 0
    assert len(answers.asked) == search.BUDGET
    assert len(read(path)) == 2 * search.BUDGET


@pytest.mark.parametrize("name", search.SUBJECTS)
def test_every_trainer_may_try_the_same_number_of_settings(name: str) -> None:
    """And each tries as many, each once. A run may take as long as the best so far."""
    answers = ScriptedContender()
    looked = looking(answers, name)
    assert looked.descend()["learning_rate"] == 2.1e-3
    assert len(answers.asked) == len(looked.tried) == search.BUDGET
    limited = "limit_seconds" if name == "clotho" else "limit"
    assert answers.asked[0][limited] == search.LIMIT
    assert answers.asked[-1][limited] == pytest.approx(1 + 0.5e-3)
    assert {case.get("floor") for case in answers.asked} == {None if name == "clotho" else search.FLOOR}
    assert {case["seed"] for case in answers.asked} == {search.SEED}


def test_all_trainers_start_alike_and_have_equally_many_options_of_their_own() -> None:
    """They vary the same other settings."""
    assert len({len(one.own) for one in search.SUBJECTS.values()}) == 1
    keys = ("learning_rate", "batch_size", "group_size", "temperature")
    assert len({tuple(one.start[key] for key in keys) for one in search.SUBJECTS.values()}) == 1


def test_the_best_settings_are_read_from_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None for a trainer without a search, for a search that was stopped, and if no settings reached the target."""
    path = tmp_path / "search.jsonl"
    monkeypatch.setattr(search, "running", scripted_contender)
    assert search.main(["--of", "trl", "--out", str(path)]) == 0
    best = search.best_settings("trl", path)
    assert best is not None
    assert best["learning_rate"] == 2.1e-3
    assert search.best_settings("clotho", path) is None
    monkeypatch.setattr(search, "TARGET", 0.99)
    assert search.best_settings("trl", path) is None
    monkeypatch.setattr(search, "TARGET", 0.7)
    monkeypatch.setattr(search, "BUDGET", search.BUDGET + 1)
    assert search.best_settings("trl", path) is None


@pytest.mark.parametrize("name", search.SUBJECTS)
def test_every_choice_is_a_setting_of_the_contender(name: str) -> None:
    """A setting that no program reads would be searched without effect."""
    subject = search.SUBJECTS[name]
    known = {
        "clotho": {*clotho_train.OPTIONS, "profile"},
        "mlx-lm-lora": settings_in("mlx_lm_lora_train", "DEFAULTS"),
        "trl": settings_in("trl_train", "SETTINGS"),
    }
    assert {key for settings in (subject.start, *sum(subject.choices, ())) for key in settings} <= known[name]


def settings_in(program: str, name: str) -> set[str]:
    """The keys of a constant of a contender, which needs other packages to be imported."""
    path = Path(clotho_train.__file__).with_name(f"{program}.py")
    assigned = {
        one.target.id: one.value
        for one in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return set(ast.literal_eval(assigned[name]))  # type: ignore[arg-type]  # an expression, as it is there
