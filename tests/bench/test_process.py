"""Contenders as processes: results, failures and alternation."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench.contenders import process
from bench.contenders.process import Contender, ContenderProcess, MissingContendersError, measure_interleaved, running
from bench.measurement import Case, Measurement, Metric

MODULE = "tests.bench.fake_contender"
METRICS = (Metric(name="runs", unit="runs", better="higher"), Metric(name="absent", unit="runs", better="higher"))


def contender(name: str) -> Contender:
    """One of the fake contenders."""
    return Contender(name=name, module=MODULE, environment={"FAKE": name})


@pytest.fixture(scope="module")
def fake() -> Iterator[ContenderProcess]:
    """One process for all tests that do not end it."""
    with running(contender("one")) as answers:
        yield answers


def measured(*cases: dict[str, str | int | float], repeats: int = 2, warm_up: int = 1) -> list[Measurement]:
    """Measure two fake contenders alternately."""
    both = [contender("one"), contender("other")]
    return measure_interleaved("decode", both, cases, METRICS, repeats=repeats, warm_up=warm_up)


def test_a_contender_reports_its_semantics_and_versions(fake: ContenderProcess) -> None:
    """Packages that are not installed are not listed."""
    assert fake.semantics == "Counts as one."
    assert set(fake.versions) == {"python", "msgspec"}


def test_a_case_is_prepared_again_after_another_case(fake: ContenderProcess) -> None:
    """Only the latest case is kept in memory."""
    first: Case = {"size": 1}
    second: Case = {"size": 2}
    counts = [fake.measure(case)["runs"] for case in (first, first, second, first)]
    assert counts == [1, 2, 1, 1]


def test_output_of_libraries_does_not_mix_with_results(fake: ContenderProcess) -> None:
    """From Python and from native code."""
    assert fake.measure({"then": "print"}) == {"runs": 1, "cost": 10.0}
    assert fake.measure({"then": "print"}) == {"runs": 2, "cost": 20.0}


@pytest.mark.parametrize(
    ("how", "expected"), [("raise", "one: ValueError: no such shape"), ("nan", "one: ValueError: Out of range float")]
)
def test_an_error_of_a_case_does_not_affect_the_next_case(how: str, expected: str, fake: ContenderProcess) -> None:
    """NaN metrics are errors too."""
    with pytest.raises(RuntimeError, match=expected):
        fake.measure({"then": how})
    assert fake.measure({"size": 3})["runs"] == 1


def test_a_dead_contender_fails_every_measurement() -> None:
    """The block that started it ends normally."""
    with running(contender("one")) as answers:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="one exited without a result"):
                answers.measure({"then": "die"})


def test_a_contender_that_does_not_start_is_an_error() -> None:
    """It is not treated as unable to do one case."""
    with pytest.raises(RuntimeError, match="dies at once exited"), running(contender("dies at once")):
        pass


def test_warmup_runs_are_not_reported() -> None:
    """Each measurement has its benchmark, unit, direction and command; unreported metrics are omitted."""
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
def test_a_contender_that_fails_a_case_is_skipped_for_that_case(
    from_run: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether it fails in warmup or later."""
    found = measured({"then": "raise", "who": "one", "from_run": from_run}, {"size": 1})
    assert [(one.contender, "then" in one.case) for one in found] == [("other", True), ("one", False), ("other", False)]
    assert capfd.readouterr().err.startswith("bench: skipped: one: ValueError: no such shape ({'then': ")


def test_a_dead_contender_does_not_stop_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    """It is skipped in all later cases."""
    found = measured({"then": "die", "who": "one", "from_run": 2}, {"size": 1})
    assert [one.contender for one in found] == ["other", "other"]
    assert capfd.readouterr().err.count("bench: skipped: one exited without a result") == 2


def test_missing_contenders_raise_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with the variable that names another interpreter."""
    monkeypatch.setenv(process.VARIABLE, "/no/such/python")
    foreign = Contender(name="peer", module=MODULE, foreign=True)
    with pytest.raises(MissingContendersError, match="not installed at /no/such/python; run python3"):
        measure_interleaved("decode", [foreign], [{}], METRICS, repeats=1)


def test_a_foreign_contender_uses_the_contenders_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names the interpreter."""
    monkeypatch.setenv(process.VARIABLE, sys.executable)
    with running(Contender(name="peer", module=MODULE, foreign=True)) as answers:
        assert answers.measure({})["runs"] == 1
