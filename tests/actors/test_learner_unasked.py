"""The learner where groups come unasked, from environments: only those that teach something count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from actors.learner import MAX_DISCARDED_HELD, LearnerProgress
from clotho.runtime.compute_thread import ComputeExecutor
from protocols.accounting import SourceCounts
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from tests.actors.boxes import compute_thread
from tests.actors.learner_scene import Scene, lost, taught


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


def sent_by(name: str, outcome: GroupOutcome) -> GroupOutcome:
    """The same outcome, of a group from that environment."""
    if isinstance(outcome, Discarded):
        return replace(outcome, prompt=replace(outcome.prompt, source=name))
    assert isinstance(outcome, ScoredGroup)
    return replace(outcome, group=replace(outcome.group, prompt=replace(outcome.group.prompt, source=name)))


async def test_a_batch_waits_for_as_many_groups_as_can_be_learnt_from(executor: ComputeExecutor) -> None:
    """However many others come in between; each of those lets one more be fetched."""
    scene = Scene(executor, [lost(0), taught(1), lost(2), lost(3), lost(4), taught(5)], from_environments=True)
    (report,) = await scene.run()
    assert (report.step, len(report.trained), len(report.discarded), report.replaced) == (1, 2, 4, 4)
    assert scene.refills.value == 4
    assert scene.ledger.balance(prompted=6, carried_over=0).holds


async def test_what_comes_after_the_last_batch_is_surplus(executor: ComputeExecutor) -> None:
    """It ends in the books, with its reason, and no update is made of it; nobody waits for more."""
    scene = Scene(executor, [taught(i) for i in range(5)], from_environments=True, steps=2)
    reports = await scene.run()
    assert [report.step for report in reports] == [1, 2]
    assert scene.ledger.state().discarded == {"surplus": 1}
    assert [(early.step, len(early.discarded)) for early in scene.ended_early] == [(3, 1)]
    assert scene.ledger.balance(prompted=5, carried_over=0).holds


async def test_a_run_that_had_all_its_batches_learns_nothing_more(executor: ComputeExecutor) -> None:
    """As one that is resumed after its end: what an earlier life had received is entered, and that is all."""
    scene = Scene(
        executor, [lost(0), taught(1), taught(2)], from_environments=True, steps=2, progress=LearnerProgress(step=2)
    )
    assert await scene.run() == []
    assert scene.ledger.state().discarded == {"reward_error": 1, "surplus": 2}


async def test_whoever_sends_nothing_else_cannot_fill_the_memory(executor: ComputeExecutor) -> None:
    """Discarded groups are entered and told in parts, and the batch that forms meanwhile is none the poorer."""
    count = 2 * MAX_DISCARDED_HELD + 3
    scene = Scene(
        executor, [taught(0), *(lost(i) for i in range(1, count + 1)), taught(count + 1)], from_environments=True
    )
    (report,) = await scene.run()
    assert [len(early.discarded) for early in scene.ended_early] == [MAX_DISCARDED_HELD, MAX_DISCARDED_HELD]
    assert (len(report.trained), len(report.discarded)) == (2, 3)
    assert {early.step for early in scene.ended_early} == {report.step}
    assert scene.ledger.balance(prompted=count + 2, carried_over=0).holds


async def test_the_books_are_kept_for_each_environment_too(executor: ComputeExecutor) -> None:
    """Trained and discarded by name, and the balance of each must hold for that of the run to hold."""
    outcomes = [sent_by("a", taught(0)), sent_by("b", lost(1)), sent_by("b", taught(2)), sent_by("a", taught(3))]
    scene = Scene(executor, outcomes, from_environments=True, steps=1)
    await scene.run()
    assert scene.ledger.state().sources == {
        "a": SourceCounts(trained=1, discarded={"surplus": 1}),
        "b": SourceCounts(trained=1, discarded={"reward_error": 1}),
    }
    assert scene.ledger.balance(prompted=4, carried_over=0, received={"a": 2, "b": 2}).holds
    assert not scene.ledger.balance(prompted=4, carried_over=0, received={"a": 3, "b": 1}).holds


async def test_a_run_that_is_drained_takes_no_step_for_groups_that_taught_nothing(executor: ComputeExecutor) -> None:
    """They are entered; with one that did, the rest is a last, smaller batch."""
    nothing = Scene(executor, [lost(0), lost(1)], from_environments=True)
    assert await nothing.run() == []
    assert (nothing.progress.step, nothing.ledger.state().discarded) == (0, {"reward_error": 2})
    something = Scene(executor, [lost(0), taught(1)], from_environments=True)
    (report,) = await something.run()
    assert (report.step, len(report.trained), len(report.discarded)) == (1, 1, 1)
