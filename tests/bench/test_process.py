"""Contenders as processes: what they answer, what is said when they fail, and their turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench.contenders import process
from bench.contenders.process import Answers, Contender, Metric, MissingContendersError, by_turns, running
from bench.measurement import Measurement

MODULE = "tests.bench.fake_contender"
METRICS = (Metric(name="runs", unit="runs", better="higher"), Metric(name="absent", unit="runs", better="higher"))


def contender(name: str) -> Contender:
    """One of the fakes."""
    return Contender(name=name, module=MODULE, environment={"FAKE": name})


@pytest.fixture(scope="module")
def fake() -> Iterator[Answers]:
    """One that runs for all tests that leave it alive."""
    with running(contender("one")) as answers:
        yield answers


def measured(*cases: dict[str, str | int | float], repeats: int = 2, warm_up: int = 1) -> list[Measurement]:
    """Two fakes by turns."""
    both = [contender("one"), contender("other")]
    return by_turns("decode", both, cases, METRICS, repeats=repeats, command="python -m bench decode", warm_up=warm_up)


def test_a_contender_says_first_what_its_numbers_mean_and_what_it_runs_on(fake: Answers) -> None:
    """Packages that it lacks are not listed."""
    assert fake.semantics == "Counts as one."
    assert set(fake.versions) == {"python", "msgspec"}


def test_a_case_is_prepared_once_and_again_after_another(fake: Answers) -> None:
    """Only the latest is kept, so that two never share the memory."""
    first, second = {"size": 1}, {"size": 2}
    counts = [fake.measure(case)["runs"] for case in (first, first, second, first)]
    assert counts == [1, 2, 1, 1]


def test_what_a_library_prints_does_not_mix_with_the_answers(fake: Answers) -> None:
    """Neither from Python, nor past it."""
    assert fake.measure({"then": "print"}) == {"runs": 1, "cost": 10.0}
    assert fake.measure({"then": "print"}) == {"runs": 2, "cost": 20.0}


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "one: ValueError: no such shape"), ("nan", "one: ValueError: Out of range float")]
)
def test_what_a_case_raises_is_its_answer_and_the_next_case_works(how: str, said: str, fake: Answers) -> None:
    """A metric that is no number is no metric."""
    with pytest.raises(RuntimeError, match=said):
        fake.measure({"then": how})
    assert fake.measure({"size": 3})["runs"] == 1


def test_a_contender_that_dies_says_so_every_time_it_is_asked() -> None:
    """What it said itself stands on standard error; and the block that ran it ends in peace."""
    with running(contender("one")) as answers:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="one ended without an answer"):
                answers.measure({"then": "die"})


def test_a_contender_that_does_not_start_is_an_error() -> None:
    """It is not taken for one that cannot do a case."""
    with pytest.raises(RuntimeError, match="dies at once ended"), running(contender("dies at once")):
        pass


def test_warm_up_is_left_out_and_values_of_equal_index_belong_together() -> None:
    """Everything that tells a number apart stands beside it; metrics that nobody answers with are none."""
    found = measured({"size": 1})
    assert [(one.contender, one.metric, one.values) for one in found] == [
        ("one", "runs", [2.0, 3.0]),
        ("other", "runs", [2.0, 3.0]),
    ]
    assert {(one.question, one.unit, one.better, one.command) for one in found} == {
        ("decode", "runs", "higher", "python -m bench decode")
    }
    assert found[1].semantics == "Counts as other."
    assert found[0].case == {"size": 1}


@pytest.mark.parametrize("from_run", [1, 3])
def test_who_cannot_do_a_case_is_left_out_of_it_alone(from_run: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether warming up shows it, or a later run."""
    found = measured({"then": "raise", "who": "one", "from_run": from_run}, {"size": 1})
    assert [(one.contender, "then" in one.case) for one in found] == [
        ("other", True),
        ("one", False),
        ("other", False),
    ]
    assert capfd.readouterr().err.startswith("bench: left out: one: ValueError: no such shape ({'then': ")


def test_the_dead_do_not_keep_the_others_from_their_numbers(capfd: pytest.CaptureFixture[str]) -> None:
    """Who died in one case is left out of all that follow."""
    found = measured({"then": "die", "who": "one", "from_run": 2}, {"size": 1})
    assert [one.contender for one in found] == ["other", "other"]
    assert capfd.readouterr().err.count("bench: left out: one ended without an answer") == 2


def test_contenders_that_are_not_installed_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs them, and the variable that names another place."""
    monkeypatch.setenv(process.VARIABLE, "/no/such/python")
    foreign = Contender(name="peer", module=MODULE, foreign=True)
    with pytest.raises(MissingContendersError, match="no contenders at /no/such/python: python3"):
        by_turns("decode", [foreign], [{}], METRICS, repeats=1, command="")


def test_a_foreign_contender_runs_in_the_environment_of_the_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose interpreter the variable names."""
    monkeypatch.setenv(process.VARIABLE, sys.executable)
    with running(Contender(name="peer", module=MODULE, foreign=True)) as answers:
        assert answers.measure({})["runs"] == 1
