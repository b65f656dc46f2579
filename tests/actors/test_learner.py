"""The learner: every group ends in its books exactly once, whatever becomes of it, and updates are all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from actors.learner import LearnerProgress
from clotho.config.sections_training import BufferedReplay
from clotho.runtime.compute_thread import ComputeExecutor
from protocols.errors import DivergenceError, ExecutorStoppedError
from protocols.queues import EndOfStream, QueueClosed
from tests.actors.boxes import cancelled_midway, compute_thread, everything
from tests.actors.learner_scene import Scene, lost, taught
from tests.training.policies_and_groups import scored_group

NAN = float("nan")


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


async def test_a_batch_becomes_an_update_that_everyone_is_told(executor: ComputeExecutor) -> None:
    """Version, books and arrays agree on every arrow; nothing is put in service by the learner."""
    scene = Scene(executor, [taught(0), taught(1), taught(2), taught(3)])
    reports = await scene.run()
    assert [(report.step, report.version, len(report.trained)) for report in reports] == [(1, 1, 2), (2, 2, 2)]
    assert [report.staleness for report in reports] == [(0, 0), (1, 1)]
    for reader in scene.told:
        updates = await everything(reader)
        assert [update.report for update in updates] == reports
        assert [update.ledger.trained for update in updates] == [2, 4]
        assert updates[-1].parameters is scene.learned.parameters
    assert len({report.fingerprint for report in reports}) == 2
    assert scene.policy.version == 0
    assert scene.ledger.balance(prompted=4, carried_over=0).holds
    assert scene.progress.step == 2
    assert scene.progress.trained_tokens == sum(report.update.trained_tokens for report in reports if report.update)


async def test_an_update_does_not_depend_on_which_group_came_first(executor: ComputeExecutor) -> None:
    """Groups of a batch are ordered by their number, so that a run can be repeated bit for bit."""
    forwards = await Scene(executor, [taught(0), taught(1), taught(2)], batch_size=3).run()
    backwards = await Scene(executor, [taught(2), taught(0), taught(1)], batch_size=3).run()
    assert forwards[0].fingerprint == backwards[0].fingerprint


async def test_what_ended_before_counts_towards_the_batch(executor: ComputeExecutor) -> None:
    """The update is made from the rest; a batch of nothing else advances the step, not the version."""
    scene = Scene(executor, [lost(0), taught(1), lost(2), lost(3)])
    first, second = await scene.run()
    assert (first.step, first.version, first.update is not None) == (1, 1, True)
    assert (second.step, second.version, second.update) == (2, 1, None)
    assert second.fingerprint == first.fingerprint
    state = scene.ledger.state()
    assert (state.trained, state.discarded) == (1, {"reward_error": 3})


async def test_groups_older_than_the_bound_are_discarded(executor: ComputeExecutor) -> None:
    """Staleness is the learner's version less the oldest version that drew a token of the group."""
    outcomes = [taught(group_id) for group_id in range(4)]
    scene = Scene(executor, outcomes, batch_size=1, max_staleness=1)
    reports = await scene.run()
    assert [report.staleness for report in reports] == [(0,), (1,), (), ()]
    assert [drop.reason for report in reports for drop in report.discarded] == ["stale", "stale"]
    assert reports[-1].discarded[0].detail == "2 versions old, learner.max_staleness is 1"
    assert reports[-1].discarded[0].completions, "what was sampled is kept for the record"
    assert scene.ledger.balance(prompted=4, carried_over=0).holds


async def test_a_group_without_a_token_is_invalid(executor: ComputeExecutor) -> None:
    """Whoever made it: it costs itself, not the run."""
    scene = Scene(executor, [scored_group([[], []], [0.0, 1.0], group_id=0), taught(1)])
    [report] = await scene.run()
    assert [(drop.reason, drop.prompt.group_id) for drop in report.discarded] == [("invalid", 0)]
    assert len(report.trained) == 1


async def test_an_update_that_is_not_finite_changes_nothing(executor: ComputeExecutor) -> None:
    """Its groups are discarded, weights and moments stand, and the next good batch learns."""
    scene = Scene(executor, [taught(0, logprob=NAN), taught(1, logprob=NAN), taught(2), taught(3)])
    before = scene.learned.fingerprint
    bad, good = await scene.run()
    assert (bad.version, bad.fingerprint, bad.trained) == (0, before, ())
    assert {drop.reason for drop in bad.discarded} == {"not_finite"}
    assert bad.update is not None
    assert not bad.update.update_applied
    assert (good.version, scene.progress.bad_steps) == (1, 0)
    alone = await Scene(executor, [taught(2), taught(3)]).run()
    assert good.fingerprint == alone[0].fingerprint, "as if the bad batch had never been"
    assert scene.ledger.balance(prompted=4, carried_over=0).holds


async def test_too_many_bad_updates_in_a_row_end_the_run(executor: ComputeExecutor) -> None:
    """After they were reported and booked, at the weights of before."""
    outcomes = [taught(group_id, logprob=NAN) for group_id in range(20)]
    scene = Scene(executor, outcomes, batch_size=1, max_bad_steps=3)
    with pytest.raises(DivergenceError, match="3 consecutive updates were not finite, the last one at step 3"):
        await scene.box.run()
    assert [report.step for report in await everything(scene.reported)] == [1, 2, 3]
    assert scene.ledger.state().discarded == {"not_finite": 3}


async def test_a_run_resumed_after_that_may_try_again(executor: ComputeExecutor) -> None:
    """A batch that taught nothing is no bad update; one more bad update is."""
    scene = Scene(
        executor, [lost(0), taught(1)], batch_size=1, max_bad_steps=3, progress=LearnerProgress(step=3, bad_steps=3)
    )
    assert [report.step for report in await scene.run()] == [4, 5]
    assert scene.progress.bad_steps == 0
    outcomes = [lost(0), taught(1, logprob=NAN)]
    scene = Scene(executor, outcomes, batch_size=1, max_bad_steps=3, progress=LearnerProgress(step=3, bad_steps=3))
    with pytest.raises(DivergenceError, match="4 consecutive updates"):
        await scene.box.run()


async def test_what_is_left_at_the_end_is_one_smaller_batch(executor: ComputeExecutor) -> None:
    """Nothing that was scored is dropped because it came last."""
    reports = await Scene(executor, [taught(group_id) for group_id in range(5)]).run()
    assert [len(report.trained) for report in reports] == [2, 2, 1]


async def test_a_group_that_comes_twice_ends_the_run(executor: ComputeExecutor) -> None:
    """The books would be wrong from there on."""
    with pytest.raises(ValueError, match="group 0 has already ended"):
        await Scene(executor, [taught(0), taught(0)]).box.run()


async def test_nobody_left_to_read_the_numbers_is_no_reason_to_stop(executor: ComputeExecutor) -> None:
    """The monitor may go; those who need the weights may not."""
    scene = Scene(executor, [taught(0), taught(1)])
    scene.reported.close()
    await scene.box.run()
    assert scene.progress.step == 1
    scene = Scene(executor, [taught(0), taught(1)])
    scene.told[1].close()
    with pytest.raises(QueueClosed, match=r"updates\.other"):
        await scene.box.run()


async def test_however_it_ends_it_closes_every_end(executor: ComputeExecutor) -> None:
    """Readers get the end, its writer gets QueueClosed."""
    scene = Scene(executor, [taught(0)] * 2)
    with pytest.raises(ValueError, match="already ended"):
        await scene.box.run()
    for reader in (*scene.told, scene.reported):
        with pytest.raises(EndOfStream):
            await reader.receive()
    with pytest.raises(QueueClosed):
        scene.refills.put(1)


async def test_replayed_groups_are_learnt_from_beside_the_batch_and_end_only_once(executor: ComputeExecutor) -> None:
    """From the second update on: what was just learned from is kept after its update. The books have it once."""
    outcomes = [taught(group_id) for group_id in range(6)]
    scene = Scene(executor, outcomes, replay=BufferedReplay(capacity=3, groups=2))
    reports = await scene.run()
    assert [report.replayed for report in reports] == [0, 2, 2]
    tokens = [report.update.trained_tokens for report in reports if report.update]
    assert tokens == [10, 20, 20]
    assert [len(report.trained) for report in reports] == [2, 2, 2]
    assert scene.ledger.balance(prompted=6, carried_over=0).holds
    *_, last = await everything(scene.told[0])
    assert [(kept.scored.group.prompt.group_id, kept.version) for kept in last.replay] == [(3, 2), (4, 3), (5, 3)]
    plain = await Scene(executor, outcomes).run()
    assert plain[0].fingerprint == reports[0].fingerprint
    assert plain[1].fingerprint != reports[1].fingerprint


async def test_what_teaches_nothing_is_neither_kept_nor_an_occasion_to_replay(executor: ComputeExecutor) -> None:
    """A batch of nothing new is a step without update, whatever the buffer holds."""
    outcomes = [taught(0), taught(1), lost(2), lost(3), taught(4, logprob=NAN), lost(5)]
    scene = Scene(executor, outcomes, replay=BufferedReplay(capacity=8))
    reports = await scene.run()
    assert [(report.version, report.replayed) for report in reports] == [(1, 0), (1, 0), (1, 2)]
    assert [kept.scored.group.prompt.group_id for kept in scene.replay.groups()] == [0, 1]


async def test_cancelled_inside_an_update_it_books_nothing(executor: ComputeExecutor) -> None:
    """The update is given up as a whole: its groups have not ended, and a resumed run asks them again."""
    scene, gate = Scene(executor, [taught(0), taught(1)]), threading.Event()
    executor.submit(gate.wait)
    await cancelled_midway(scene.box.run)
    gate.set()
    executor.submit(lambda: None).result()
    assert (scene.learned.version, scene.progress.step) == (0, 0)
    assert list(scene.ledger.unended(2)) == [0, 1]
    for reader in (*scene.told, scene.reported):
        with pytest.raises(EndOfStream):
            await reader.receive()


async def test_a_compute_thread_that_has_ended_is_a_failure(executor: ComputeExecutor) -> None:
    """Nothing is booked that was not learned."""
    scene = Scene(executor, [taught(0), taught(1)])
    executor.stop()
    with pytest.raises(ExecutorStoppedError):
        await scene.box.run()
    assert list(scene.ledger.unended(2)) == [0, 1]
