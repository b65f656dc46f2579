"""Alarms: they trip on what destroys a policy, before it is destroyed, and on nothing else."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from clotho.config.schema import CollapseDetectionSection
from clotho.monitoring.collapse_detection import Alarms
from protocols.collapse import CollapseState
from protocols.step import StepReport
from tests.monitoring.recorded import DESTROYED, HEALTHY, Line
from tests.monitoring.reports import GOOD, batch, metrics, report

DEFAULTS = CollapseDetectionSection()


def after_good_times(updates: int = DEFAULTS.window, good: Line = GOOD, **settings: Any) -> Alarms:
    """Alarms that know what is normal."""
    alarms = Alarms(CollapseDetectionSection(**settings))
    for _ in range(updates):
        assert alarms.observe(batch(good)).healthy
    return alarms


def signs(alarms: Alarms, line: Line) -> str:
    """What alarms say of one more batch."""
    return "; ".join(alarms.observe(batch(line)).signs)


def first_trip(lines: tuple[Line, ...], settings: CollapseDetectionSection = DEFAULTS) -> int | None:
    """The update at which a recorded run would have tripped the alarm, from 1."""
    alarms = Alarms(settings)
    tripped = (number for number, line in enumerate(lines, 1) if alarms.observe(batch(line)).tripped)
    return next(tripped, None)


def test_a_recorded_collapse_trips_before_accuracy_has_halved() -> None:
    """Best 0.95; at the alarm 0.93; three updates later 0.26."""
    update = first_trip(DESTROYED)
    assert update is not None
    best = max(line.accuracy or 0.0 for line in DESTROYED[:update])
    at_the_alarm = DESTROYED[update - 1].accuracy
    assert at_the_alarm is not None
    assert at_the_alarm > 0.5 * best
    assert DESTROYED[update + 2].accuracy < 0.5 * best  # type: ignore[operator]


def test_rewards_and_ratios_alone_see_the_recorded_collapse_too_but_late() -> None:
    """Where nobody measured how far updates moved the policy."""
    blind = tuple(line._replace(step_kl=0.0) for line in DESTROYED)
    assert first_trip(blind) == 8


def test_a_recorded_healthy_run_trips_nothing() -> None:
    """40 updates of the shipped profile, nowhere near."""
    assert first_trip(HEALTHY) is None
    assert max(line.step_kl for line in HEALTHY) < DEFAULTS.step_kl_high / 10


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (GOOD._replace(step_kl=0.11), "the update moved the policy by 0.11 nats per token"),
        (GOOD._replace(ess=0.29), "the effective sample size is 29.0% of the tokens"),
        (GOOD._replace(reward=0.6), "the mean reward fell from 1 to 0.6"),
        (GOOD._replace(entropy=0.26), "the entropy rose from 0.05 to 0.26 nats"),
        (GOOD._replace(entropy=0.0004), "the entropy fell from 0.05 to 0.0004 nats"),
        (GOOD._replace(length=81.0), "completions grew from 20 to 81 tokens"),
        (GOOD._replace(truncated=0.5), "50% of completions are cut off, 0% in good times"),
        (GOOD._replace(empty_form=0.5), "50% of completions have form without content, 0% in good times"),
    ],
)
def test_every_sign_is_named_and_trips_when_it_lasts(bad: Line, words: str) -> None:
    """One update is chance; `patience` in a row are not. One good update in between starts anew."""
    alarms = after_good_times()
    assert signs(alarms, bad) == words
    assert not alarms.observe(batch(GOOD)).signs
    verdicts = [alarms.observe(batch(bad)) for _ in range(2)]
    assert [verdict.tripped for verdict in verdicts] == [False, True]


@pytest.mark.parametrize(
    "line",
    [
        GOOD._replace(step_kl=0.09),
        GOOD._replace(ess=0.31),
        GOOD._replace(reward=0.75),
        GOOD._replace(entropy=0.24),
        GOOD._replace(entropy=0.0006),
        GOOD._replace(length=79.0),
        GOOD._replace(truncated=0.29),
        GOOD._replace(empty_form=0.33),
    ],
    ids=str,
)
def test_short_of_its_bound_nothing_is_a_sign(line: Line) -> None:
    """Each default bound, from the other side."""
    assert signs(after_good_times(), line) == ""


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"step_kl_high": 0.01}, GOOD._replace(step_kl=0.02)),
        ({"ess_low": 0.9}, GOOD._replace(ess=0.8)),
        ({"reward_drop": 0.2}, GOOD._replace(reward=0.75)),
        ({"entropy_high": 6.0}, GOOD._replace(entropy=0.4)),
        ({"entropy_low": 0.5}, GOOD._replace(entropy=0.02)),
        ({"length_high": 2.0}, GOOD._replace(length=50.0)),
        ({"truncated_high": 0.1}, GOOD._replace(truncated=0.2)),
        ({"empty_format_high": 0.2}, GOOD._replace(empty_form=0.3)),
    ],
    ids=str,
)
def test_every_bound_is_the_profiles(settings: dict[str, Any], line: Line) -> None:
    """Another bound, another verdict."""
    assert signs(after_good_times(**settings), line) != ""


def test_the_divergence_from_the_reference_has_a_bound_of_its_own() -> None:
    """Where a penalty has it computed."""
    alarms = Alarms(CollapseDetectionSection(kl_high=1.5))
    near, far = (report(update=metrics(GOOD, kl=kl, kl_beta=0.1)) for kl in (1.4, 1.6))
    assert alarms.observe(near).healthy
    assert alarms.observe(far).signs == ("the policy is 1.6 nats per token from its reference",)


def test_different_signs_in_a_row_are_one_collapse() -> None:
    """What looks bad in one way first and in another way next looks bad all the same."""
    alarms = after_good_times()
    assert not alarms.observe(batch(GOOD._replace(ess=0.1))).tripped
    assert alarms.observe(batch(GOOD._replace(reward=0.1))).tripped


def test_patience_says_how_long_it_must_last() -> None:
    """1 trips at once."""
    bad = batch(GOOD._replace(ess=0.1))
    assert Alarms(CollapseDetectionSection(patience=1)).observe(bad).tripped
    alarms = Alarms(CollapseDetectionSection(patience=3))
    assert [alarms.observe(bad).tripped for _ in range(4)] == [False, False, True, True]


def test_an_update_that_destroys_the_policy_at_once_needs_no_second() -> None:
    """Half a nat per token is no accident that passes."""
    assert not Alarms(DEFAULTS).observe(batch(GOOD._replace(step_kl=0.49))).tripped
    alarms = Alarms(DEFAULTS)
    assert alarms.observe(batch(GOOD._replace(step_kl=0.51))).tripped
    assert alarms.observe(batch(GOOD._replace(ess=0.1))).tripped
    assert not alarms.observe(batch(GOOD)).tripped
    assert Alarms(DEFAULTS).observe(batch(GOOD._replace(step_kl=math.nan))).tripped, "to no probabilities at all"


def test_a_slow_decline_is_measured_against_the_best_times() -> None:
    """Two percent a batch: never far from the batches just before, in the end far from the best."""
    alarms = after_good_times()
    reward, updates = GOOD.reward, 0
    while not alarms.observe(batch(GOOD._replace(reward=reward))).tripped:
        reward, updates = 0.98 * reward, updates + 1
        assert updates < 40
    assert 0.6 < reward < 0.7


def test_answers_that_grow_steadily_are_no_sign() -> None:
    """Ten times as long after many updates is how reasoning is learned; at once it is not."""
    alarms = after_good_times()
    for update in range(60):
        assert signs(alarms, GOOD._replace(length=20.0 * 1.04**update)) == ""


def test_nothing_is_normal_before_enough_has_been_seen() -> None:
    """Until then only fixed bounds hold, and what looks bad never becomes normal."""
    alarms = after_good_times(DEFAULTS.window - 1)
    assert signs(alarms, GOOD._replace(reward=0.1)) == ""
    alarms = after_good_times()
    for _ in range(20):
        assert signs(alarms, GOOD._replace(reward=0.1)) != ""


def test_learning_the_form_first_is_no_cheating() -> None:
    """Form everywhere while content grows as well: that is how it starts. Where content falls it is cheating."""
    start = GOOD._replace(empty_form=0.0)
    for content_too, expected in ((True, False), (False, True)):
        alarms = Alarms(DEFAULTS)
        for _ in range(DEFAULTS.window):
            alarms.observe(_with_form(start, form=0.1, content=0.1))
        verdict = alarms.observe(_with_form(start, form=1.0, content=0.2 if content_too else 0.0))
        assert bool(verdict.signs) is expected


def _with_form(line: Line, *, form: float, content: float) -> StepReport:
    """A batch with shares of completions that have the form, and that have content."""
    made = batch(line)
    groups = [trained.scored for trained in made.trained]
    count = sum(len(group.rewards) for group in groups)
    changed, place = [], 0
    for group in groups:
        places = range(place, place := place + len(group.rewards))
        parts = {
            "format": tuple(float(i < round(form * count)) for i in places),
            "exact": tuple(float(i < round(content * count)) for i in places),
        }
        changed.append(msgspec.structs.replace(group, parts=parts))
    return report(changed, [], made.update)


def test_small_noisy_batches_are_judged_together() -> None:
    """One group of failures is chance; many are not."""
    alarms = Alarms(CollapseDetectionSection(patience=1))
    good, bad = batch(GOOD, groups=1, spread=0.0), batch(GOOD._replace(reward=0.05), groups=1, spread=0.0)
    for _ in range(20):
        alarms.observe(good)
    assert alarms.observe(bad).healthy
    verdicts = [alarms.observe(bad).tripped for _ in range(16)]
    assert not verdicts[0]
    assert verdicts[-1]


def test_a_drop_that_chance_explains_is_no_sign() -> None:
    """Groups that differ widely make a mean that means little."""
    drop = GOOD._replace(reward=0.6)
    assert after_good_times().observe(batch(drop, spread=0.3)).signs
    assert after_good_times().observe(batch(drop, spread=0.6)).healthy


def test_a_batch_that_shows_nothing_changes_nothing() -> None:
    """Neither patience nor what is normal."""
    alarms = after_good_times()
    alarms.observe(batch(GOOD._replace(ess=0.1)))
    before = alarms.state()
    assert not alarms.observe(report()).signs
    assert alarms.state() == before
    assert alarms.observe(batch(GOOD._replace(ess=0.1))).tripped


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_a_checkpoint_in_between_changes_no_verdict(cut: int) -> None:
    """The state survives a file exactly."""
    whole = Alarms(DEFAULTS)
    expected = [whole.observe(batch(line)) for line in DESTROYED]
    alarms = Alarms(DEFAULTS)
    verdicts = [alarms.observe(batch(line)) for line in DESTROYED[:cut]]
    state = msgspec.json.decode(msgspec.json.encode(alarms.state()), type=CollapseState)
    assert state == alarms.state()
    resumed = Alarms(DEFAULTS, state)
    verdicts += [resumed.observe(batch(line)) for line in DESTROYED[cut:]]
    assert verdicts == expected


def test_after_going_back_alarms_start_anew() -> None:
    """What was normal for the policy that collapsed says nothing of the one that goes on."""
    alarms = after_good_times()
    alarms.observe(batch(GOOD._replace(ess=0.1)))
    alarms.restart()
    assert alarms.state() == CollapseState()
    assert signs(alarms, GOOD._replace(reward=0.1)) == ""


def test_what_is_remembered_is_bounded() -> None:
    """However long the run."""
    alarms = after_good_times(50)
    assert len(alarms.state().healthy) == DEFAULTS.window
    assert len(alarms.state().groups) == 16
