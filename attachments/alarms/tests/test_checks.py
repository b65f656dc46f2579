"""Signs of a collapse and slow decoding: each has its own finding with a remedy, and a healthy run has none."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from attachments.alarms.checks import (
    CALM_UPDATES,
    CUT_REPORTS,
    EXPERT_UPDATES,
    FLIPPED_REPORTS,
    CollapseCheck,
    CutCheck,
    ExpertCheck,
    RouteCheck,
    ThroughputCheck,
)
from attachments.alarms.tests.collapse_reports import completion, scored
from clotho.settings.objectives import DppoTv, Grpo, Gspo, ObjectiveSettings, RejectSequenceCorrection
from protocols.finding import LOWER_RATE, Change, Finding
from protocols.step import StepReport, TrainedGroup
from tests.training_run.records.display_examples import UPDATE, step, trained
from tests.training_run.records.observed_run import ObservedRun, groups

SEVERE = Finding(name="update_too_large", severity="error", fact="f", consequence="c", advice="a", remedy=LOWER_RATE)


def observed() -> ObservedRun:
    """A run with the checks of this attachment."""
    return ObservedRun(lambda clock: CollapseCheck(), ThroughputCheck)


def collapsed(number: int = 1, *, applied: bool = True, findings: tuple[Finding, ...] = (SEVERE,)) -> StepReport:
    """Return the report of a step with signs of a collapse."""
    report = step(number, groups=groups(1.0), update=replace(UPDATE, update_applied=applied))
    return replace(report, collapse_findings=findings)


def test_a_healthy_run_has_no_finding() -> None:
    """Rewards vary and rise, and the rate is steady."""
    run = observed()
    for number in range(40):
        assert run.step(step(number, groups=groups(1.0 + number / 100)), tokens_per_second=1000 + number % 7) == set()


def test_a_rate_far_below_the_best_of_the_run_is_a_finding_until_it_rises() -> None:
    """Only if it stays low for several steps."""
    run = observed()
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


def test_a_low_rate_is_a_finding_after_five_reports_however_long_they_take() -> None:
    """The median of three reports is low from the second one on."""
    run = observed()
    for _ in range(5):
        run.step()
    for _ in range(5):
        run.clock += 1000.0
        assert run.step(tokens_per_second=400) == set()
    assert run.step(tokens_per_second=400) == {"slow"}


def test_a_rate_is_compared_with_that_of_comparable_work() -> None:
    """Longer completions are slower."""
    run = observed()
    for _ in range(5):
        run.step()
    group = scored((1.0, 0.0), completions=[completion(300), completion(300)])
    longer = (TrainedGroup(scored=group, advantages=(1.0, -1.0)),) * 16
    for _ in range(12):
        found = run.step(step(1, groups=longer), tokens_per_second=300)
    assert found == set()


def test_a_reward_that_falls_is_a_finding_that_names_the_learning_rate() -> None:
    """Equal rewards afterwards, and batches without an update, do not end it; a rising reward does."""
    run = observed()
    for _ in range(4):
        run.step(step(1, groups=groups(2.0)))
    for _ in range(4):
        run.step(step(2, groups=groups(0.02), update=replace(UPDATE, learning_rate=5e-3)))
    (finding,) = run.findings.now
    assert (finding.name, finding.severity) == ("reward_collapse", "error")
    assert "learner.optimizer.learning_rate (at most 0.005 so far)" in finding.advice
    assert run.step(step(3, groups=groups(0.02), update=None)) == {"reward_collapse"}
    for _ in range(3):
        names = run.step(step(4, groups=groups(2.0)))
    assert names == set()


@pytest.mark.parametrize("batch_size", [16])
def test_problems_of_which_few_can_be_solved_are_no_collapse(batch_size: int) -> None:
    """A third of the groups earns the whole reward, the others that of the format, in hundreds of batches."""
    run, draws = observed(), random.Random(0)
    for _ in range(5000 // batch_size):
        rewards = [1.2 if draws.random() < 0.3 else 0.2 for _ in range(batch_size)]
        batch = tuple(trained(number, rewards=(reward,) * 4) for number, reward in enumerate(rewards))
        assert run.step(step(1, groups=batch)) == set()


def test_a_sign_of_collapse_stays_until_several_updates_show_none() -> None:
    """Batches without an update do not count, because a collapsed policy often has none."""
    run = observed()
    assert run.step(collapsed()) == {"update_too_large"}
    for _ in range(10):
        assert run.step(collapsed(applied=False, findings=())) == {"update_too_large"}
    for _ in range(CALM_UPDATES - 1):
        assert run.step(collapsed(findings=())) == {"update_too_large"}
    assert run.step(collapsed(findings=())) == set()


def test_a_rollback_ends_the_signs_of_collapse() -> None:
    """The step of the rollback has them. Then the weights are healthy again."""
    run = observed()
    run.step(collapsed())
    assert run.step(replace(collapsed(), rolled_back=True)) == {"update_too_large"}
    assert run.step(collapsed(findings=())) == set()


@pytest.mark.parametrize(
    ("objective", "key", "value"),
    [
        (Grpo(clip_low=1e-3), "ratio_reference", "batch_start"),
        (Gspo(importance_correction=RejectSequenceCorrection()), "importance_correction", "truncate"),
        (DppoTv(clip_low=1e-3), "clip_low and clip_high", ""),
    ],
)
def test_tokens_that_are_cut_without_a_move_of_the_policy_are_a_finding_with_the_key(
    objective: ObjectiveSettings, key: str, value: str
) -> None:
    """Three updates in a row cut 5 % of their on-policy tokens; stale updates say nothing about rounding."""
    run = ObservedRun(lambda clock: CutCheck(objective))
    cut = step(1, groups=groups(1.0), update=replace(UPDATE, unmoved_cut_fraction=0.06))
    for _ in range(CUT_REPORTS):
        assert run.names == set()
        run.step(replace(cut, staleness=(0, 1)))
        run.step(replace(step(1, groups=groups(1.0)), staleness=(1, 1)))
    (finding,) = run.findings.now
    assert finding.name == "cut_without_moving"
    assert str(objective.__struct_config__.tag) in finding.fact
    assert f"learner.objective.{key}" in finding.advice
    assert finding.remedy.changes == ((Change(key=f"learner.objective.{key}", value=value),) if value else ())
    assert run.step(replace(cut, update=UPDATE, staleness=(0,))) == set()


def test_experts_that_compute_no_token_any_more_are_a_finding() -> None:
    """Three updates in a row with a tenth more unused experts than the best update, before which a checkpoint is."""

    def update(number: int, unused: float | None) -> StepReport:
        return step(number, groups=groups(1.0), update=replace(UPDATE, unused_experts_fraction=unused))

    run = ObservedRun(lambda clock: ExpertCheck())
    assert run.step(update(1, None)) == set()
    for number, unused in enumerate((0.25, 0.125, 0.2, 0.25, 0.25), start=2):
        assert run.step(update(number, unused)) == set()
    assert run.step(update(7, 0.25)) == {"experts_die"}
    (finding,) = run.findings.now
    assert finding.remedy.before_step == 3
    assert EXPERT_UPDATES == 3
    assert run.step(update(8, 0.2)) == set()


def test_other_experts_than_those_of_the_sampler_are_a_finding() -> None:
    """At three updates in a row; stale groups, whose weights were others, and replayed routes do not count."""

    def update(flips: float | None, *, replayed: bool = False, staleness: int = 0) -> StepReport:
        changed = replace(UPDATE, flipped_routes=flips, replayed_routes=replayed)
        return replace(step(1, groups=groups(1.0), update=changed), staleness=(staleness,))

    run = ObservedRun(lambda clock: RouteCheck())
    for report in (update(None), update(50.0), update(50.0, staleness=1), update(9.0), update(50.0), update(50.0)):
        assert run.step(report) == set()
    assert run.step(update(50.0)) == {"routes_flip"}
    assert FLIPPED_REPORTS == 3
    (finding,) = run.findings.now
    assert finding.remedy.changes == (Change(key="learner.router_replay", value="on"),)
    assert run.step(update(50.0, replayed=True)) == set()
