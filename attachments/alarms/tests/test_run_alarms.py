"""Alarms during a run: each injected fault has its own finding with a remedy, and a healthy run has none."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from attachments.alarms.collapse_detection import LOWER_RATE
from attachments.alarms.run_alarms import CALM_UPDATES, RunAlarms
from attachments.alarms.tests.collapse_reports import completion, scored
from protocols.finding import Finding
from protocols.step import StepReport, TrainedGroup
from protocols.summary import ResourceReading, RunGauges
from tests.training_run.records.display_examples import UPDATE, step, trained

HEALTHY = ResourceReading(
    resident_bytes=2**30,
    cpu_share=2.0,
    swap_bytes=2**30,
    swap_change_bytes=2**20,
    available_bytes=2**33,
    memory_level="normal",
    thermal="moderate",
    on_battery=False,
    low_power=False,
)
SEVERE = Finding(name="update_too_large", severity="error", fact="f", consequence="c", advice="a", remedy=LOWER_RATE)


class Run:
    """Alarms of a run whose steps take ten seconds; a step decodes 1000 tokens in 20 decode steps."""

    def __init__(
        self, *, reported: Iterable[str] = (), complete: Callable[[Finding], Finding] = lambda finding: finding
    ) -> None:
        self.now = 0.0
        self.gauges = RunGauges()
        self.alarms = RunAlarms({}, reported=tuple(reported), complete=complete, clock=lambda: self.now)

    def step(self, report: StepReport | None = None, *, tokens_per_second: float = 1000.0) -> set[str]:
        """Report a step, and return the names of the findings that apply then."""
        self.now += 10.0
        self.gauges = replace(
            self.gauges,
            tokens_sampled=self.gauges.tokens_sampled + 1000,
            decode_steps=self.gauges.decode_steps + 20,
            decode_seconds=self.gauges.decode_seconds + 1000 / tokens_per_second,
        )
        self.alarms.observe(report or step(1, groups=groups(1.0)), self.gauges)
        return self.names

    def read(self, reading: ResourceReading) -> set[str]:
        """Report a reading of the machine, and return the names of the findings that apply then."""
        self.alarms.observe_resources(reading)
        return self.names

    @property
    def names(self) -> set[str]:
        """Names of the findings that apply."""
        return {finding.name for finding in self.alarms.findings}


def groups(reward: float, count: int = 16) -> tuple[TrainedGroup, ...]:
    """Return groups of four completions, of which half have the reward, and half have none."""
    return tuple(trained(number, rewards=(reward, 0.0) * 2) for number in range(count))


def collapsed(number: int = 1, *, applied: bool = True, findings: tuple[Finding, ...] = (SEVERE,)) -> StepReport:
    """Return the report of a step with signs of a collapse."""
    report = step(number, groups=groups(1.0), update=replace(UPDATE, update_applied=applied))
    return replace(report, collapse_findings=findings)


def test_a_healthy_run_has_no_finding() -> None:
    """Rewards vary and rise, the rate is steady, and the machine has memory."""
    run = Run()
    for number in range(40):
        assert run.step(step(number, groups=groups(1.0 + number / 100)), tokens_per_second=1000 + number % 7) == set()
        assert run.read(HEALTHY) == set()


def test_a_rate_far_below_the_best_of_the_run_is_a_finding_until_it_rises() -> None:
    """Only if it stays low for several steps."""
    run = Run()
    for _ in range(5):
        run.step()
    for _ in range(5):
        assert run.step(tokens_per_second=400) == set()
    for _ in range(5):
        found = run.step(tokens_per_second=400)
    assert found == {"slow"}
    for _ in range(3):
        found = run.step()
    assert found == set()


def test_long_requests_that_fill_the_kv_cache_are_a_finding_that_names_them() -> None:
    """At the third report in a row at which others wait for the KV cache."""
    run = Run()
    run.gauges = replace(run.gauges, cache_holders=("chatcmpl-1", "chatcmpl-2"))
    for number in range(1, 4):
        assert run.names == set()
        run.step(step(number, groups=groups(1.0)))
    assert run.names == {"kv_cache_full"}
    (finding,) = run.alarms.findings
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
    run = Run()
    for number in range(1, 4):
        assert run.names == set()
        run.gauges = replace(run.gauges, scorer_full_seconds=full * number, groups_scored_at_once=8)
        run.step(replace(step(number, groups=groups(1.0)), wait_seconds=waited))
    assert run.names == found
    run.step(replace(step(4, groups=groups(1.0)), wait_seconds=1.0))
    assert run.names == set()


def test_a_rate_is_compared_with_that_of_comparable_work() -> None:
    """Longer completions are slower."""
    run = Run()
    for _ in range(5):
        run.step()
    group = scored((1.0, 0.0), completions=[completion(300), completion(300)])
    longer = (TrainedGroup(scored=group, advantages=(1.0, -1.0)),) * 16
    for _ in range(12):
        found = run.step(step(1, groups=longer), tokens_per_second=300)
    assert found == set()


@pytest.mark.parametrize(
    ("reading", "expected"),
    [
        (replace(HEALTHY, swap_change_bytes=2**30), "swap_growing"),
        (replace(HEALTHY, memory_level="warning"), "memory_pressure"),
        (replace(HEALTHY, memory_level="critical"), "memory_pressure"),
        (replace(HEALTHY, thermal="heavy"), "thermal_pressure"),
        (replace(HEALTHY, low_power=True), "low_power_mode"),
        (replace(HEALTHY, on_battery=True), "on_battery"),
        (ResourceReading(), None),
    ],
    ids=["swap", "pressure", "critical pressure", "heat", "low power", "battery", "nothing is known"],
)
def test_a_state_of_the_machine_that_slows_the_run_is_a_finding(reading: ResourceReading, expected: str | None) -> None:
    """It lasts as long as the state. One reading with memory pressure is none."""
    run = Run()
    run.read(reading)
    assert run.read(reading) == ({expected} if expected else set())
    assert all(finding.advice and finding.consequence for finding in run.alarms.findings)
    assert run.read(HEALTHY) == set()


def test_a_reward_that_falls_is_a_finding_that_names_the_learning_rate() -> None:
    """Equal rewards afterwards, and batches without an update, do not end it; a rising reward does."""
    run = Run()
    for _ in range(4):
        run.step(step(1, groups=groups(2.0)))
    for _ in range(4):
        run.step(step(2, groups=groups(0.02), update=replace(UPDATE, learning_rate=5e-3)))
    (finding,) = run.alarms.findings
    assert (finding.name, finding.severity) == ("reward_collapse", "error")
    assert "learner.optimizer.learning_rate (at most 0.005 so far)" in finding.advice
    assert run.step(step(3, groups=groups(0.02), update=None)) == {"reward_collapse"}
    for _ in range(3):
        names = run.step(step(4, groups=groups(2.0)))
    assert names == set()


def test_a_noisy_reward_is_no_collapse() -> None:
    """The drop must exceed the noise of both means, and half of the range."""
    run = Run()
    for solved in (8, 6, 9, 5, 7, 8):
        batch = tuple(trained(number, rewards=(2.0 * (number < solved), 0.0)) for number in range(16))
        assert run.step(step(1, groups=batch)) == set()


@pytest.mark.parametrize("batch_size", [4, 16])
def test_problems_of_which_few_can_be_solved_are_no_collapse(batch_size: int) -> None:
    """A third of the groups earns the whole reward, the others that of the format, in hundreds of batches."""
    run, draws = Run(), random.Random(0)
    for _ in range(5000 // batch_size):
        rewards = [1.2 if draws.random() < 0.3 else 0.2 for _ in range(batch_size)]
        batch = tuple(trained(number, rewards=(reward,) * 4) for number, reward in enumerate(rewards))
        assert run.step(step(1, groups=batch)) == set()


def test_the_loss_of_all_that_was_learned_is_a_collapse() -> None:
    """Within a few batches, although the format is still rewarded."""
    run, draws = Run(), random.Random(0)
    for chance in [0.6] * 20 + [0.0] * 4:
        rewards = [1.2 if draws.random() < chance else 0.2 for _ in range(16)]
        batch = tuple(trained(number, rewards=(reward,) * 4) for number, reward in enumerate(rewards))
        names = run.step(step(1, groups=batch))
    assert "reward_collapse" in names


def test_a_sign_of_collapse_stays_until_several_updates_show_none() -> None:
    """Batches without an update do not count, because a collapsed policy often has none."""
    run = Run()
    assert run.step(collapsed()) == {"update_too_large"}
    for _ in range(10):
        assert run.step(collapsed(applied=False, findings=())) == {"update_too_large"}
    for _ in range(CALM_UPDATES - 1):
        assert run.step(collapsed(findings=())) == {"update_too_large"}
    assert run.step(collapsed(findings=())) == set()


def test_a_rollback_ends_the_signs_of_collapse() -> None:
    """The step of the rollback has them. Then the weights are healthy again."""
    run = Run()
    run.step(collapsed())
    assert run.step(replace(collapsed(), rolled_back=True)) == {"update_too_large"}
    assert run.step(collapsed(findings=())) == set()


def test_a_finding_is_logged_with_its_remedy_when_it_begins_and_when_it_ends() -> None:
    """However long it lasts. The record of its end has all its parts too. A finding that the start has reported is not
    logged again.
    """
    run, known = Run(), Run(reported=["on_battery"])
    with capture_logs() as events:
        for reading in (replace(HEALTHY, on_battery=True),) * 3 + (HEALTHY,):
            run.read(reading)
    first, second = events
    assert (first["event"], first["finding"], first["log_level"]) == ("finding", "on_battery", "warning")
    assert all(first[part] for part in ("fact", "consequence", "advice"))
    assert (second["event"], second["log_level"]) == ("finding_over", "info")
    others = ("event", "log_level")
    assert {key: second[key] for key in second if key not in others} == {
        key: first[key] for key in first if key not in others
    }
    with capture_logs() as events:
        assert known.read(replace(HEALTHY, on_battery=True)) == {"on_battery"}
    assert events == []


def test_errors_are_before_warnings() -> None:
    """The live display shows the first findings."""
    run = Run()
    run.read(replace(HEALTHY, on_battery=True))
    run.step(collapsed())
    assert [finding.severity for finding in run.alarms.findings] == ["error", "warning"]


def test_the_first_groups_are_checked_before_their_report() -> None:
    """The finding is logged once, although the report has the same groups, and groups are not counted twice."""
    outcomes = [group.scored for group in groups(0.0, count=4)]
    run = Run()
    with capture_logs() as events:
        run.alarms.preview(outcomes)
        before = run.read(HEALTHY)
        after = run.step(step(1, groups=groups(0.0, count=4)))
    assert before == after == {"no_reward"}
    assert [event["finding"] for event in events] == ["no_reward"]
    mixed = Run()
    mixed.alarms.preview(outcomes[:3])
    assert mixed.step(step(1, groups=groups(0.0, count=3))) == set()
