"""Collapse detection: statistics of batches, checks, baselines and verdicts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from attachments.alarms.collapse_detection import (
    BatchStatistics,
    CollapseDetector,
    CollapseState,
    batch_statistics,
    group_statistics,
)
from attachments.alarms.sections import CollapseChecks, WarnOnCollapse
from attachments.alarms.tests.collapse_reports import GOOD, batch, completion, discarded, metrics, report, scored
from protocols.rollout import ScoredGroup
from protocols.step import StepReport
from tests.training_run.records.recorded_runs import COLLAPSED, HEALTHY, Line
from training_run.update_values import limited_k3

DEFAULTS = WarnOnCollapse()


def detector_with_baseline(updates: int = DEFAULTS.window, good: Line = GOOD, **settings: Any) -> CollapseDetector:
    """Return a detector with a complete baseline."""
    detector = CollapseDetector(WarnOnCollapse(**settings))
    for _ in range(updates):
        assert detector.observe(batch(good)).healthy
    return detector


def warnings(detector: CollapseDetector, line: Line) -> str:
    """Return the warnings for one more batch."""
    return "; ".join(finding.fact for finding in detector.observe(batch(line)).findings)


def first_trip(lines: tuple[Line, ...], settings: CollapseChecks = DEFAULTS) -> int | None:
    """Return the number of the update, from 1, at which the detection trips on a recorded run."""
    detector = CollapseDetector(settings)
    tripped = (number for number, line in enumerate(lines, 1) if detector.observe(batch(line)).tripped)
    return next(tripped, None)


def test_a_recorded_collapse_trips_before_the_accuracy_is_halved() -> None:
    """The best accuracy is 0.95, the accuracy at the detection 0.93, three updates later 0.26."""
    update = first_trip(COLLAPSED)
    assert update is not None
    best = max(line.accuracy or 0.0 for line in COLLAPSED[:update])
    at_detection = COLLAPSED[update - 1].accuracy
    assert at_detection is not None
    assert at_detection > 0.5 * best
    assert COLLAPSED[update + 2].accuracy < 0.5 * best  # type: ignore[operator]


def test_a_recorded_healthy_run_never_trips() -> None:
    """40 updates with the default profile."""
    assert first_trip(HEALTHY) is None
    assert max(line.update_kl for line in HEALTHY) < DEFAULTS.update_kl_high / 10


def measured(log_ratios: Iterable[NDArray[np.float64]]) -> list[float]:
    """Return the KL of updates that changed the log-probabilities of their tokens by these values."""
    return [float(limited_k3(d_N).mean()) for d_N in log_ratios]


def healthy_updates(count: int) -> Iterator[NDArray[np.float64]]:
    """Yield small updates of 1,000 tokens that make one token in 250 up to 1,000 times as probable: it was rewarded."""
    source = np.random.default_rng(0)
    for _ in range(count):
        d_N = source.normal(-0.01, 0.15, 1000)
        rare = source.integers(1000, size=source.poisson(4))
        d_N[rare] = source.uniform(0.0, np.log(1000), len(rare))
        yield d_N


def test_healthy_updates_of_few_groups_are_not_too_large() -> None:
    """Few tokens that were rare before an update would exceed the limit in the plain estimate, even by five times."""
    detector = CollapseDetector(DEFAULTS)
    assert not any(
        detector.observe(batch(GOOD._replace(update_kl=kl))).findings for kl in measured(healthy_updates(200))
    )
    plain = [float(np.mean(np.expm1(d_N) - d_N)) for d_N in healthy_updates(200)]
    assert sum(kl > DEFAULTS.update_kl_high for kl in plain) > 100
    assert max(plain) > 5 * DEFAULTS.update_kl_high


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            GOOD._replace(update_kl=0.11),
            "the update changed the policy by 0.11 nats per token, more than 0.1 (collapse_detection.update_kl_high)",
        ),
        (GOOD._replace(ess=0.29), "the effective sample size is 29.0% of the tokens"),
        (GOOD._replace(reward=0.6), "the mean reward fell from 1 to 0.6"),
        (GOOD._replace(entropy=0.26), "the entropy rose from 0.05 to 0.26 nats"),
        (GOOD._replace(entropy=0.0004), "the entropy fell from 0.05 to 0.0004 nats"),
        (GOOD._replace(length=81.0), "the completion length grew from 20 to 81 tokens"),
        (GOOD._replace(truncated=0.5), "50% of completions are truncated, compared with 0% in the baseline"),
        (
            GOOD._replace(empty_form=0.5),
            "50% of completions have the format without content, compared with 0% in the baseline",
        ),
    ],
)
def test_every_check_has_a_warning_and_trips_after_patience(bad: Line, words: str) -> None:
    """A healthy update resets the count."""
    detector = detector_with_baseline()
    assert warnings(detector, bad) == words
    assert not detector.observe(batch(GOOD)).findings
    verdicts = [detector.observe(batch(bad)) for _ in range(2)]
    assert [verdict.tripped for verdict in verdicts] == [False, True]


@pytest.mark.parametrize(
    "line",
    [
        GOOD._replace(update_kl=0.09), GOOD._replace(ess=0.31), GOOD._replace(reward=0.75), GOOD._replace(entropy=0.24),
        GOOD._replace(entropy=0.0006), GOOD._replace(length=79.0), GOOD._replace(truncated=0.29),
        GOOD._replace(empty_form=0.33),
    ],
    ids=str,
)  # fmt: skip
def test_no_check_triggers_below_its_threshold(line: Line) -> None:
    """For each default threshold."""
    assert warnings(detector_with_baseline(), line) == ""


def test_the_kl_to_the_reference_has_a_threshold() -> None:
    """If a KL penalty is configured."""
    detector = CollapseDetector(WarnOnCollapse(kl_high=1.5))
    near, far = (report(update=metrics(GOOD, kl=kl, kl_beta=0.1)) for kl in (1.4, 1.6))
    assert detector.observe(near).healthy
    assert [finding.name for finding in detector.observe(far).findings] == ["far_from_reference"]


def test_different_checks_in_consecutive_updates_count_together() -> None:
    """The consecutive updates need not trigger the same check."""
    detector = detector_with_baseline()
    assert not detector.observe(batch(GOOD._replace(ess=0.1))).tripped
    assert detector.observe(batch(GOOD._replace(reward=0.1))).tripped


def test_a_very_large_update_kl_trips_immediately() -> None:
    """Five times the threshold, or NaN."""
    assert not CollapseDetector(DEFAULTS).observe(batch(GOOD._replace(update_kl=0.49))).tripped
    detector = CollapseDetector(DEFAULTS)
    assert detector.observe(batch(GOOD._replace(update_kl=0.51))).tripped
    assert detector.observe(batch(GOOD._replace(ess=0.1))).tripped
    assert not detector.observe(batch(GOOD)).tripped
    assert CollapseDetector(DEFAULTS).observe(batch(GOOD._replace(update_kl=math.nan))).tripped


def test_a_slow_decline_is_compared_with_the_best_baseline() -> None:
    """The reward falls by 2 % per batch."""
    detector = detector_with_baseline()
    reward, updates = GOOD.reward, 0
    while not detector.observe(batch(GOOD._replace(reward=reward))).tripped:
        reward, updates = 0.98 * reward, updates + 1
        assert updates < 40
    assert 0.6 < reward < 0.7


def test_slowly_growing_completions_do_not_trigger() -> None:
    """The length is compared with the latest median."""
    detector = detector_with_baseline()
    for update in range(60):
        assert warnings(detector, GOOD._replace(length=20.0 * 1.04**update)) == ""


def test_there_is_no_baseline_before_the_window_is_full() -> None:
    """Only fixed thresholds apply before. Batches with warnings never enter the baseline."""
    detector = detector_with_baseline(DEFAULTS.window - 1)
    assert warnings(detector, GOOD._replace(reward=0.1)) == ""
    detector = detector_with_baseline()
    for _ in range(20):
        assert warnings(detector, GOOD._replace(reward=0.1)) != ""


def test_format_without_content_triggers_only_if_content_fell() -> None:
    """Policies often learn the format first."""
    start = GOOD._replace(empty_form=0.0)
    for content_grows, expected in ((True, False), (False, True)):
        detector = CollapseDetector(DEFAULTS)
        for _ in range(DEFAULTS.window):
            detector.observe(_with_format(start, format_share=0.1, content_share=0.1))
        verdict = detector.observe(_with_format(start, format_share=1.0, content_share=0.2 if content_grows else 0.0))
        assert bool(verdict.findings) is expected


def _with_format(line: Line, *, format_share: float, content_share: float) -> StepReport:
    """Return a batch with these shares of completions with format and with content."""
    made = batch(line)
    groups = [trained.scored for trained in made.trained]
    count = sum(len(group.rewards) for group in groups)
    changed, place = [], 0
    for group in groups:
        places = range(place, place := place + len(group.rewards))
        parts = {
            "format": tuple(float(i < round(format_share * count)) for i in places),
            "exact": tuple(float(i < round(content_share * count)) for i in places),
        }
        changed.append(msgspec.structs.replace(group, parts=parts))
    return report(changed, [], made.update)


def test_small_batches_are_assessed_together() -> None:
    """One group of failures does not trigger, many do."""
    detector = CollapseDetector(WarnOnCollapse(patience=1))
    good, bad = batch(GOOD, groups=1, spread=0.0), batch(GOOD._replace(reward=0.05), groups=1, spread=0.0)
    for _ in range(20):
        detector.observe(good)
    assert detector.observe(bad).healthy
    verdicts = [detector.observe(bad).tripped for _ in range(16)]
    assert not verdicts[0]
    assert verdicts[-1]


def test_a_drop_within_the_noise_does_not_trigger() -> None:
    """The standard error of the batch mean is large if the groups differ."""
    drop = GOOD._replace(reward=0.6)
    assert detector_with_baseline().observe(batch(drop, spread=0.2)).findings
    assert detector_with_baseline().observe(batch(drop, spread=0.6)).healthy


@pytest.mark.parametrize("batch_size", [16])
def test_problems_of_which_few_can_be_solved_are_no_reward_drop(batch_size: int) -> None:
    """A third of the groups earns the whole reward, the others that of the format, in hundreds of batches."""
    detector, draws = CollapseDetector(DEFAULTS), random.Random(0)
    for _ in range(5000 // batch_size):
        groups = [scored([1.2 if draws.random() < 0.3 else 0.2] * 4) for _ in range(batch_size)]
        assert detector.observe(report(groups)).healthy


def test_a_batch_without_statistics_changes_nothing() -> None:
    """Neither the count of consecutive updates nor the baseline."""
    detector = detector_with_baseline()
    detector.observe(batch(GOOD._replace(ess=0.1)))
    before = detector.state()
    assert not detector.observe(report()).findings
    assert detector.state() == before
    assert detector.observe(batch(GOOD._replace(ess=0.1))).tripped


@pytest.mark.parametrize("cut", [0, 1, 3, 6])
def test_a_restored_state_gives_the_same_verdicts(cut: int) -> None:
    """The state survives serialization exactly."""
    uninterrupted = CollapseDetector(DEFAULTS)
    expected = [uninterrupted.observe(batch(line)) for line in COLLAPSED]
    detector = CollapseDetector(DEFAULTS)
    verdicts = [detector.observe(batch(line)) for line in COLLAPSED[:cut]]
    state = msgspec.json.decode(msgspec.json.encode(detector.state()), type=CollapseState)
    assert state == detector.state()
    resumed = CollapseDetector(DEFAULTS, state)
    verdicts += [resumed.observe(batch(line)) for line in COLLAPSED[cut:]]
    assert verdicts == expected


def test_a_reset_forgets_the_baseline() -> None:
    """After a rollback the baseline is collected again."""
    detector = detector_with_baseline()
    detector.observe(batch(GOOD._replace(ess=0.1)))
    detector.reset()
    assert detector.state() == CollapseState()
    assert warnings(detector, GOOD._replace(reward=0.1)) == ""


def test_the_state_has_a_bounded_size() -> None:
    """For any number of updates."""
    detector = detector_with_baseline(50)
    assert len(detector.state().healthy) == DEFAULTS.window
    assert len(detector.state().groups) == 16


def test_discarded_groups_count() -> None:
    """A policy that always fails has only zero-variance groups."""
    statistics = list(group_statistics(report([scored([1.0, 3.0])], [discarded(scored([0.0, 0.0]))])))
    assert [(group.reward, group.lowest) for group in statistics] == [(2.0, 1.0), (0.0, 0.0)]
    group = batch_statistics(statistics, report())
    assert (group.reward, group.reward_error) == (1.0, 1.0)  # deviation of (2, 0) is sqrt 2, over sqrt 2


def test_stale_groups_are_skipped() -> None:
    """After a rollback, stale groups are from the policy that was rolled back."""
    stale = msgspec.structs.replace(discarded(scored([9.0, 9.0])), reason="stale")
    assert [group.reward for group in group_statistics(report([scored([1.0])], [stale]))] == [1.0]


def test_groups_without_finite_rewards_are_skipped() -> None:
    """Groups that failed before scoring, and groups with a NaN reward."""
    failed = msgspec.structs.replace(discarded(scored([1.0])), rewards=(), parts={})
    statistics = list(group_statistics(report([scored([math.nan, 1.0])], [failed])))
    assert statistics == []
    assert batch_statistics(statistics, report()) == BatchStatistics()


@pytest.mark.parametrize("rewards", [[1e308, 1e308], [-1e308, 1e308], [2e9, 0.0]])
def test_groups_with_huge_rewards_are_skipped(rewards: list[float]) -> None:
    """Their sums would overflow."""
    assert list(group_statistics(report([scored(rewards)], [discarded(scored(rewards))]))) == []


def test_length_and_truncation_are_means_over_completions() -> None:
    """For each group."""
    (group,) = group_statistics(report([scored([0.0, 1.0], None, [completion(2), completion(6, truncated=True)])]))
    assert (group.length, group.truncated) == (4.0, 0.5)


def test_empty_form_is_full_format_reward_without_content_reward() -> None:
    """Components that do not apply and the length penalty are not content."""
    parts = {
        "format": (1.0, 1.0, 0.5, 1.0),
        "exact": (0.0, 0.5, 0.0, None),
        "overlong": (0.0, 0.0, 0.0, -1.0),
        "math_eval": (None, None, None, None),
    }
    (group,) = group_statistics(report([scored([0.0] * 4, parts)]))
    assert group.empty_form == 1 / 3  # one of the three completions with a content reward
    assert group.content == 1 / 3


def test_empty_form_needs_a_format_and_a_content_reward() -> None:
    """Otherwise it is None."""
    for parts in ({"exact": (0.0,)}, {"format": (1.0,)}, {"format": (1.0,), "overlong": (0.0,)}, {}):
        (group,) = group_statistics(report([scored([0.0], parts)]))
        assert (group.empty_form, group.content) == (None, None)


def test_metrics_of_a_skipped_update_are_ignored() -> None:
    """NaN values are ignored too, except for the update KL."""
    skipped = report(update=metrics(GOOD, applied=False))
    assert batch_statistics((), skipped) == BatchStatistics()
    nan = report(update=metrics(GOOD._replace(entropy=math.nan)))
    assert batch_statistics((), nan).entropy is None
    assert batch_statistics((), nan).ess == GOOD.ess


def test_nan_counts_as_exceeding_every_threshold() -> None:
    """An update KL of NaN becomes infinity."""
    for value in (math.nan, math.inf):
        assert batch_statistics((), report(update=metrics(GOOD._replace(update_kl=value)))).update_kl == math.inf
    assert batch_statistics((), report(update=msgspec.structs.replace(metrics(GOOD), update_kl=None))).update_kl is None


def test_the_kl_is_ignored_without_a_kl_penalty() -> None:
    """Without a penalty it is reported as 0, which would group like an ideal."""
    assert batch_statistics((), report(update=metrics(GOOD, kl=0.5))).kl is None
    assert batch_statistics((), report(update=metrics(GOOD, kl=0.5, kl_beta=0.1))).kl == 0.5


def test_one_group_has_no_standard_error() -> None:
    """The standard error needs two groups."""
    statistics = list(group_statistics(report([scored([0.0, 1.0])])))
    assert batch_statistics(statistics, report()).reward_error is None


EASY, HARD = 7, 3
"""Number of rewarded completions of ten, in each environment."""


def environment_group(source: str, correct: int) -> ScoredGroup:
    """Return a group of ten completions, `correct` of which have reward 1."""
    made = scored([1.0] * correct + [0.0] * (10 - correct))
    return replace(made, group=replace(made.group, prompt=replace(made.group.prompt, source=source)))


def observe_mixture(detector: CollapseDetector, *, easy: int, hard: int, correct: int = EASY) -> str:
    """Return the warnings for a batch with this number of groups of each environment."""
    groups = [environment_group("easy", correct + i % 2) for i in range(easy)] + [
        environment_group("hard", HARD + i % 2) for i in range(hard)
    ]
    return "; ".join(finding.fact for finding in detector.observe(report(groups, (), metrics(GOOD))).findings)


@pytest.mark.parametrize(
    ("before", "after", "batches"), [((12, 4), (0, 16), 5), ((16, 0), (8, 8), WarnOnCollapse().window)]
)
def test_a_different_mixture_of_environments_is_not_a_reward_drop(
    before: tuple[int, int], after: tuple[int, int], batches: int
) -> None:
    """One pauses, and the mean becomes that of the other; one without a baseline joins, until its window is full."""
    detector = CollapseDetector(WarnOnCollapse())
    for easy, hard in [before] * 20 + [after] * batches:
        assert observe_mixture(detector, easy=easy, hard=hard) == ""


def test_a_drop_in_one_environment_triggers() -> None:
    """With an unchanged mixture."""
    detector = CollapseDetector(WarnOnCollapse())
    for _ in range(20):
        assert observe_mixture(detector, easy=12, hard=4) == ""
    assert "reward fell" in observe_mixture(detector, easy=12, hard=4, correct=0)
