"""The learner with groups of environments: only trainable groups count towards a batch."""

from __future__ import annotations

from msgspec.structs import replace

from actors.learner import MAX_DISCARDED_HELD
from clotho.lanes.compute_thread import Compute
from protocols.accounting import SourceCounts
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from tests.actors.learner_harness import LearnerHarness, discarded_group, trainable_group
from training_run.groups.progress import LearnerProgress


def group_of_environment(name: str, outcome: GroupOutcome) -> GroupOutcome:
    """Return the outcome as a group of this environment."""
    if isinstance(outcome, Discarded):
        return replace(outcome, prompt=replace(outcome.prompt, source=name))
    assert isinstance(outcome, ScoredGroup)
    return replace(outcome, group=replace(outcome.group, prompt=replace(outcome.group.prompt, source=name)))


async def test_a_batch_waits_for_batch_size_trainable_groups(compute: Compute) -> None:
    """Each group without training signal lets the fetcher fetch one more."""
    harness = LearnerHarness(
        compute,
        [
            discarded_group(0),
            trainable_group(1),
            discarded_group(2),
            discarded_group(3),
            discarded_group(4),
            trainable_group(5),
        ],
        from_environments=True,
    )
    (report,) = await harness.run()
    assert (report.step, len(report.trained), len(report.discarded), report.replaced) == (1, 2, 4, 4)
    assert harness.replacements.value == 4
    assert harness.ledger.balance(prompted=6, carried_over=0).holds


async def test_groups_after_the_last_batch_are_discarded_as_surplus(compute: Compute) -> None:
    """They end in the group accounting with this reason, without an update."""
    harness = LearnerHarness(compute, [trainable_group(i) for i in range(5)], from_environments=True, steps=2)
    reports = await harness.run()
    assert [report.step for report in reports] == [1, 2]
    assert harness.ledger.state().discarded == {"surplus": 1}
    assert [(early.step, len(early.discarded)) for early in harness.ended_early] == [(3, 1)]
    assert harness.ledger.balance(prompted=5, carried_over=0).holds


async def test_a_completed_run_makes_no_further_update(compute: Compute) -> None:
    """Groups that an earlier start had received are counted as discarded."""
    harness = LearnerHarness(
        compute,
        [discarded_group(0), trainable_group(1), trainable_group(2)],
        from_environments=True,
        steps=2,
        progress=LearnerProgress(step=2),
    )
    assert await harness.run() == []
    assert harness.ledger.state().discarded == {"reward_error": 1, "surplus": 2}


async def test_memory_for_untrainable_groups_is_bounded(compute: Compute) -> None:
    """Discarded groups are counted and reported in parts. The current batch is unchanged."""
    count = 2 * MAX_DISCARDED_HELD + 3
    harness = LearnerHarness(
        compute,
        [trainable_group(0), *(discarded_group(i) for i in range(1, count + 1)), trainable_group(count + 1)],
        from_environments=True,
    )
    (report,) = await harness.run()
    assert [len(early.discarded) for early in harness.ended_early] == [MAX_DISCARDED_HELD, MAX_DISCARDED_HELD]
    assert (len(report.trained), len(report.discarded)) == (2, 3)
    assert {early.step for early in harness.ended_early} == {report.step}
    assert harness.ledger.balance(prompted=count + 2, carried_over=0).holds


async def test_group_accounting_is_kept_per_environment(compute: Compute) -> None:
    """Trained and discarded groups by environment. Each balance holds."""
    outcomes = [
        group_of_environment("a", trainable_group(0)),
        group_of_environment("b", discarded_group(1)),
        group_of_environment("b", trainable_group(2)),
        group_of_environment("a", trainable_group(3)),
    ]
    harness = LearnerHarness(compute, outcomes, from_environments=True, steps=1)
    await harness.run()
    assert harness.ledger.state().sources == {
        "a": SourceCounts(trained=1, discarded={"surplus": 1}),
        "b": SourceCounts(trained=1, discarded={"reward_error": 1}),
    }
    assert harness.ledger.balance(prompted=4, carried_over=0, received={"a": 2, "b": 2}).holds
    assert not harness.ledger.balance(prompted=4, carried_over=0, received={"a": 3, "b": 1}).holds


async def test_a_drained_run_makes_no_step_of_untrainable_groups(compute: Compute) -> None:
    """They are counted. With one trainable group they form a smaller last batch."""
    nothing = LearnerHarness(compute, [discarded_group(0), discarded_group(1)], from_environments=True)
    assert await nothing.run() == []
    assert (nothing.progress.step, nothing.ledger.state().discarded) == (0, {"reward_error": 2})
    something = LearnerHarness(compute, [discarded_group(0), trainable_group(1)], from_environments=True)
    (report,) = await something.run()
    assert (report.step, len(report.trained), len(report.discarded)) == (1, 1, 1)
