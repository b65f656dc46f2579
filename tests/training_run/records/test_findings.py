"""Findings of a run: when they begin and end, and the checks of every run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from protocols.finding import CHECK, Finding
from tests.training_run.records.display_examples import step
from tests.training_run.records.observed_run import ObservedRun, groups
from training_run.supervision.hooks import Check


class Scripted(Check):
    """A check whose findings a test decides."""

    def __init__(self) -> None:
        self.now: tuple[Finding, ...] = ()

    def findings(self) -> Iterable[Finding]:
        return self.now


WARNING = Finding(name="on_battery", severity="warning", fact="f", consequence="c", advice="a", remedy=CHECK)
ERROR = replace(WARNING, name="memory_pressure", severity="error")


def test_long_requests_that_fill_the_kv_cache_are_a_finding_that_names_them() -> None:
    """At the third report in a row at which others wait for the KV cache."""
    run = ObservedRun()
    run.gauges = replace(run.gauges, cache_holders=("chatcmpl-1", "chatcmpl-2"))
    for number in range(1, 4):
        assert run.names == set()
        run.step(step(number, groups=groups(1.0)))
    assert run.names == {"kv_cache_full"}
    (finding,) = run.findings.now
    assert "chatcmpl-1, chatcmpl-2" in finding.fact
    assert "engine.kv_cache_tokens" in finding.advice
    run.gauges = replace(run.gauges, cache_holders=())
    run.step(step(4, groups=groups(1.0)))
    assert run.names == set()


@pytest.mark.parametrize(
    ("waited", "full", "found"), [(8.0, 7.0, {"scorer_full"}), (8.0, 3.0, set()), (4.0, 4.0, set())]
)
def test_a_learner_that_waits_for_a_full_scorer_is_a_finding(waited: float, full: float, found: set[str]) -> None:
    """Only if the wait is at least half of the time of each of three steps, and the scorer is full in most of it."""
    run = ObservedRun()
    for number in range(1, 4):
        assert run.names == set()
        run.gauges = replace(run.gauges, scorer_full_seconds=full * number, groups_scored_at_once=8)
        run.step(replace(step(number, groups=groups(1.0)), wait_seconds=waited))
    assert run.names == found
    run.step(replace(step(4, groups=groups(1.0)), wait_seconds=1.0))
    assert run.names == set()


def test_a_finding_is_logged_when_it_begins_and_when_it_ends() -> None:
    """However long it lasts. The record of its end has all its parts too."""
    check = Scripted()
    run = ObservedRun(lambda clock: check)
    with capture_logs() as events:
        for check.now in ((WARNING,), (WARNING,), ()):
            run.findings.refresh()
    first, second = events
    assert (first["event"], first["finding"], first["log_level"]) == ("finding", "on_battery", "warning")
    assert all(first[part] for part in ("fact", "consequence", "advice"))
    assert (second["event"], second["log_level"]) == ("finding_over", "info")
    others = ("event", "log_level")
    assert {key: second[key] for key in second if key not in others} == {
        key: first[key] for key in first if key not in others
    }


def test_a_finding_that_the_start_has_reported_is_not_logged_again() -> None:
    """It applies nevertheless, and is logged if it begins a second time."""
    check = Scripted()
    run = ObservedRun(lambda clock: check, reported=["on_battery"])
    with capture_logs() as events:
        check.now = (WARNING,)
        run.findings.refresh()
    assert (events, run.names) == ([], {"on_battery"})
    with capture_logs() as events:
        for check.now in ((), (WARNING,)):
            run.findings.refresh()
    assert [event["event"] for event in events] == ["finding_over", "finding"]


def test_errors_are_before_warnings() -> None:
    """The live display shows the first findings."""
    check = Scripted()
    run = ObservedRun(lambda clock: check)
    check.now = (WARNING, ERROR)
    run.findings.refresh()
    assert run.findings.now == (ERROR, WARNING)


def test_the_first_groups_are_checked_before_their_report() -> None:
    """The finding is logged once, although the report has the same groups, and groups are not counted twice."""
    outcomes = [group.scored for group in groups(0.0, count=4)]
    run = ObservedRun()
    with capture_logs() as events:
        run.findings.preview(outcomes)
        run.findings.refresh()
        before = run.names
        after = run.step(step(1, groups=groups(0.0, count=4)))
    assert before == after == {"no_reward"}
    assert [event["finding"] for event in events] == ["no_reward"]
    mixed = ObservedRun()
    mixed.findings.preview(outcomes[:3])
    assert mixed.step(step(1, groups=groups(0.0, count=3))) == set()
