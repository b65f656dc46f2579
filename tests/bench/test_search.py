"""`search`: coordinate search over settings, each tried once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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


STARTUP, LEARN = search.TASKS["startup"], search.TASKS["learn"]
SUBJECTS = [(name, task, one) for name, task in search.TASKS.items() for one in task.subjects]


def test_the_search_keeps_the_best_value_of_each_setting() -> None:
    """From any start, trying each combination once."""
    answers = ScriptedContender()
    subject = STARTUP.subjects["mlx-lm-lora"]
    looked = search.Search(answers, STARTUP, subject, 2, "command")  # type: ignore[arg-type]  # scripted_contender
    found = looked.descend(subject.starts[0])
    assert found["learning_rate"] == 2e-3
    assert len({str(case) for case in answers.asked}) * 2 - 1 == len(answers.asked)


def test_settings_that_fail_rank_last() -> None:
    """Their other seeds are not tried."""
    answers = ScriptedContender()
    subject = STARTUP.subjects["mlx-lm-lora"]
    looked = search.Search(answers, STARTUP, subject, 3, "command")  # type: ignore[arg-type]  # scripted_contender
    assert looked.cost(subject.starts[0] | {"learning_rate": 1e-4}) > STARTUP.limit
    assert len(answers.asked) == 1
    assert [one.case["learning_rate"] for one in looked.measurements()] == [1e-4, 1e-4]


def test_settings_that_do_not_reach_the_target_rank_by_accuracy() -> None:
    """However long they took, and behind all that reach it."""
    cheap, learned, reached = (
        [{"seconds": seconds, "accuracy": accuracy}] for seconds, accuracy in ((1.0, 0.1), (9.0, 0.6), (9.9, 0.9))
    )
    costs = [search.cost_of(runs, "seconds", STARTUP) for runs in (reached, learned, cheap)]
    assert costs == sorted(costs)
    assert costs[0] == 9.9
    assert costs[1] > STARTUP.limit


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


def test_a_search_that_was_stopped_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings are stored as soon as they are tried, and are not tried again."""
    path = tmp_path / "search.jsonl"
    command = ["--task", "learn", "--of", "trl", "--resume", "--out", str(path)]
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
    assert len(answers.asked) == LEARN.budget
    assert len(read(path)) == 2 * LEARN.budget


@pytest.mark.parametrize("name", LEARN.subjects)
def test_every_trainer_may_try_the_same_number_of_settings_on_the_learning_task(name: str) -> None:
    """And each tries as many. A run may take as long as the best so far."""
    answers = ScriptedContender()
    looked = search.Search(answers, LEARN, LEARN.subjects[name], 1, "command")  # type: ignore[arg-type]  # scripted_contender
    found = looked.descend(LEARN.subjects[name].starts[0])
    assert len(answers.asked) == len(looked.tried) == LEARN.budget
    assert found["learning_rate"] == 2.1e-3
    limited = "limit_seconds" if name == "clotho" else "limit"
    assert answers.asked[0][limited] == LEARN.limit
    assert answers.asked[-1][limited] == pytest.approx(1 + 0.5e-3)
    assert {case.get("floor") for case in answers.asked} == {None if name == "clotho" else LEARN.floor}
    assert {case["seed"] for case in answers.asked} == {1000}


def test_all_trainers_vary_the_same_settings_on_the_learning_task() -> None:
    """And equally many options of their own."""
    rates, sizes, own = zip(*(one.choices for one in LEARN.subjects.values()), strict=True)
    finer = [one.finer for one in LEARN.subjects.values()]
    assert [len(set(map(str, same))) for same in (rates, sizes, finer)] == [1, 1, 1]
    assert len({len(options) for options in own}) == 1
    starts = [{**one.starts[0]} for one in LEARN.subjects.values()]
    assert (
        len({(one["learning_rate"], one["batch_size"], one["group_size"], one["temperature"]) for one in starts}) == 1
    )


def test_the_best_settings_are_read_from_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None for a trainer without a search, for a search that was stopped, and if no settings reached the target."""
    path = tmp_path / "search.jsonl"
    monkeypatch.setattr(search, "running", scripted_contender)
    assert search.main(["--task", "learn", "--of", "trl", "--out", str(path)]) == 0
    monkeypatch.setitem(search.TASKS, "learn", replace(LEARN, results=path))
    best = search.best_settings("learn", "trl")
    assert best is not None
    assert best["learning_rate"] == 2.1e-3
    assert search.best_settings("learn", "clotho") is None
    monkeypatch.setitem(search.TASKS, "learn", replace(LEARN, results=path, target=0.99))
    assert search.best_settings("learn", "trl") is None
    monkeypatch.setitem(search.TASKS, "learn", replace(LEARN, results=path, budget=LEARN.budget + 1))
    assert search.best_settings("learn", "trl") is None


def test_a_trainer_without_a_search_for_the_task_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """TRL uses the settings of mlx-lm-lora in the start-up benchmark."""
    with pytest.raises(SystemExit) as refused:
        search.main(["--of", "trl"])
    assert refused.value.code == 2
    assert "--task startup" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "task", "of"), SUBJECTS, ids=[f"{name} {of}" for name, _, of in SUBJECTS])
def test_every_choice_is_a_setting_of_the_contender(name: str, task: search.SearchTask, of: str) -> None:
    """A setting that no program reads would be searched without effect."""
    subject = task.subjects[of]
    known = {
        "clotho": {*clotho_train.OPTIONS, "profile"},
        "mlx-lm-lora": settings_in("mlx_lm_lora_train", "BEST"),
        "trl": settings_in("trl_train", "SETTINGS"),
    }
    assert {key for settings in (*subject.starts, *sum(subject.choices, ())) for key in settings} <= known[of]


def settings_in(program: str, name: str) -> set[str]:
    """The keys of a constant of a contender, which needs other packages to be imported."""
    path = Path(search.__file__).with_name("contenders") / f"{program}.py"
    assigned = {
        one.target.id: one.value
        for one in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    return set(ast.literal_eval(assigned[name]))  # type: ignore[arg-type]  # an expression, as it is there
