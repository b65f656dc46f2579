"""The learner: every group ends exactly once in the group accounting, and an update is applied completely or not at
all.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest
from anyio import create_task_group, fail_after, wait_all_tasks_blocked
from msgspec.structs import replace

from clotho.lanes.compute_thread import Compute
from protocols.checkpoint import Part
from protocols.errors import DivergenceError, ExecutorStoppedError
from protocols.queues import EndOfStream, QueueClosed
from protocols.rollout import Discarded, GroupOutcome, ScoredGroup
from protocols.step import FirstBatch, StepReport, TrainedGroup
from tests.actors.actor_helpers import cancel_when_blocked, receive_all
from tests.actors.learner_harness import LearnerHarness, discarded_group, trainable_group
from tests.training.policies_and_groups import scored_group
from training_run.groups.progress import LearnerProgress
from training_run.supervision.hooks import UpdateHook
from training_run.supervision.latest import Latest
from training_run.supervision.queues import Queue

NAN = float("nan")


async def test_a_batch_yields_one_update_on_every_outbox(compute: Compute) -> None:
    """Version, ledger and arrays agree on every outbox. The learner does not publish weights itself."""
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1), trainable_group(2), trainable_group(3)])
    reports = await harness.run()
    assert [(report.step, report.version, len(report.trained)) for report in reports] == [(1, 1, 2), (2, 2, 2)]
    assert [report.staleness for report in reports] == [(0, 0), (1, 1)]
    assert all(report.wait_seconds >= 0.0 for report in reports)
    for reader in harness.update_inboxes:
        updates = await receive_all(reader)
        assert [update.report for update in updates] == reports
        assert [update.ledger.trained for update in updates] == [2, 4]
        assert updates[-1].parameters is harness.policy_learner.parameters
    assert len({report.fingerprint for report in reports}) == 2
    assert harness.policy.version == 0
    assert harness.ledger.balance(prompted=4, carried_over=0).holds
    assert harness.progress.step == 2
    assert harness.progress.trained_tokens == sum(report.update.trained_tokens for report in reports if report.update)


async def test_an_update_is_independent_of_the_order_of_its_groups(compute: Compute) -> None:
    """Groups of a batch are sorted by id, so that a run is reproducible bit for bit."""
    forwards = await LearnerHarness(
        compute, [trainable_group(0), trainable_group(1), trainable_group(2)], batch_size=3
    ).run()
    backwards = await LearnerHarness(
        compute, [trainable_group(2), trainable_group(0), trainable_group(1)], batch_size=3
    ).run()
    assert forwards[0].fingerprint == backwards[0].fingerprint


async def test_discarded_groups_count_towards_the_batch(compute: Compute) -> None:
    """The update uses the remaining groups. A batch without trainable groups advances the step but not the version."""
    harness = LearnerHarness(compute, [discarded_group(0), trainable_group(1), discarded_group(2), discarded_group(3)])
    first, second = await harness.run()
    assert (first.step, first.version, first.update is not None) == (1, 1, True)
    assert (second.step, second.version, second.update) == (2, 1, None)
    assert second.fingerprint == first.fingerprint
    state = harness.ledger.state()
    assert (state.trained, state.discarded) == (1, {"reward_error": 3})


async def test_groups_beyond_max_staleness_are_discarded(compute: Compute) -> None:
    """Staleness is the learner's version minus the oldest version of a token of the group."""
    outcomes = [trainable_group(group_id) for group_id in range(4)]
    harness = LearnerHarness(compute, outcomes, batch_size=1, max_staleness=1)
    reports = await harness.run()
    assert [report.staleness for report in reports] == [(0,), (1,), (), ()]
    assert [drop.reason for report in reports for drop in report.discarded] == ["stale", "stale"]
    assert reports[-1].discarded[0].detail == "2 versions old, learner.max_staleness is 1"
    assert reports[-1].discarded[0].completions, "what was sampled is kept for the record"
    assert harness.ledger.balance(prompted=4, carried_over=0).holds


async def test_with_a_lag_a_batch_waits_until_as_many_more_have_arrived(compute: Compute) -> None:
    """The updates of a lag of 2 follow the arrival of the third batch, and the last two the end of the inbox. No group
    is lost and none changes its batch.
    """
    outcomes = [trainable_group(group_id) for group_id in range(8)]
    scored = Queue[GroupOutcome]("scored", capacity=8)
    sender = scored.outbox()
    harness = LearnerHarness(compute, (), scored=scored, lag=2)
    async with create_task_group() as tasks:
        tasks.start_soon(harness.learner.run)
        for outcome in outcomes[:5]:
            await sender.send(outcome)
        await wait_all_tasks_blocked()
        assert (harness.progress.step, harness.progress.updating) == (0, False)
        await sender.send(outcomes[5])
        await reached_step(harness, 1)
        await sender.send(outcomes[6])
        await wait_all_tasks_blocked()
        assert (harness.progress.step, harness.progress.updating) == (1, False)
        await sender.send(outcomes[7])
        await reached_step(harness, 2)
        sender.close()
    reports = [report for report in await receive_all(harness.report_inbox) if isinstance(report, StepReport)]
    ids = [[group.scored.group.prompt.group_id for group in report.trained] for report in reports]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert harness.ledger.balance(prompted=8, carried_over=0).holds


async def reached_step(harness: LearnerHarness, step: int) -> None:
    """Wait until the report of a step has been sent."""
    for inbox in harness.update_inboxes:
        assert (await inbox.receive()).report.step == step


async def test_a_group_without_sampled_tokens_is_discarded_as_invalid(compute: Compute) -> None:
    """The run continues."""
    harness = LearnerHarness(compute, [scored_group([[], []], [0.0, 1.0], group_id=0), trainable_group(1)])
    [report] = await harness.run()
    assert [(drop.reason, drop.prompt.group_id) for drop in report.discarded] == [("invalid", 0)]
    assert len(report.trained) == 1


@pytest.mark.parametrize("reward", [0.0, 0.1, 1e6])
async def test_a_batch_of_equal_rewards_is_a_step_without_an_update(compute: Compute, reward: float) -> None:
    """Nothing is divided by the standard deviation 0. Weights and optimizer state stay, and the metrics are finite."""
    groups = [scored_group([[1, 2], [3, 4]], [reward, reward], group_id=group_id) for group_id in (2, 3)]
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1), *groups], advantage="batch")
    update, no_update = await harness.run()
    assert (update.version, no_update.version, no_update.step) == (1, 1, 2)
    assert no_update.fingerprint == update.fingerprint
    assert [drop.reason for drop in no_update.discarded] == ["zero_variance", "zero_variance"]
    assert no_update.update is not None
    assert not no_update.update.update_applied
    assert math.isfinite(no_update.update.loss)
    assert no_update.update.grad_norm == 0.0
    assert harness.progress.bad_steps == 0
    assert harness.ledger.balance(prompted=4, carried_over=0).holds


@pytest.mark.parametrize("difference", [1e-12, 1e-9, 1e-6])
async def test_almost_equal_rewards_move_the_weights_no_further_than_others(
    compute: Compute, difference: float
) -> None:
    """A tiny standard deviation gives advantages below those of rewards that differ by 1."""
    almost = scored_group([[1, 2], [3, 4]], [0.5, 0.5 + difference], group_id=0)
    (report,) = await LearnerHarness(compute, [almost], batch_size=1).run()
    (other,) = await LearnerHarness(compute, [trainable_group(0)], batch_size=1).run()
    assert report.update is not None
    assert other.update is not None
    assert all(abs(advantage) <= 1.0 for group in report.trained for advantage in group.advantages)
    assert report.update.grad_norm <= other.update.grad_norm


async def test_a_non_finite_update_changes_no_parameter(compute: Compute) -> None:
    """Its groups are discarded. Weights and optimizer state stay, and the next finite batch is applied."""
    harness = LearnerHarness(
        compute,
        [trainable_group(0, logprob=NAN), trainable_group(1, logprob=NAN), trainable_group(2), trainable_group(3)],
    )
    before = harness.policy_learner.fingerprint
    bad, good = await harness.run()
    assert (bad.version, bad.fingerprint, bad.trained) == (0, before, ())
    assert {drop.reason for drop in bad.discarded} == {"not_finite"}
    assert bad.update is not None
    assert not bad.update.update_applied
    assert (good.version, harness.progress.bad_steps) == (1, 0)
    alone = await LearnerHarness(compute, [trainable_group(2), trainable_group(3)]).run()
    assert good.fingerprint == alone[0].fingerprint, "as if the bad batch had never been"
    assert harness.ledger.balance(prompted=4, carried_over=0).holds


async def test_max_bad_steps_non_finite_updates_in_a_row_end_the_run(compute: Compute) -> None:
    """The steps are reported and counted before the error. The weights are those before the first bad update."""
    outcomes = [trainable_group(group_id, logprob=NAN) for group_id in range(20)]
    harness = LearnerHarness(compute, outcomes, batch_size=1, max_bad_steps=3)
    with pytest.raises(DivergenceError, match="3 consecutive updates were not finite, the last one at step 3"):
        await harness.learner.run()
    assert [report.step for report in await receive_all(harness.report_inbox)] == [1, 2, 3]
    assert harness.ledger.state().discarded == {"not_finite": 3}


async def test_a_resumed_run_counts_one_bad_step_less(compute: Compute) -> None:
    """A batch without trainable groups is not a bad step. One further bad update ends the run."""
    harness = LearnerHarness(
        compute,
        [discarded_group(0), trainable_group(1)],
        batch_size=1,
        max_bad_steps=3,
        progress=LearnerProgress(step=3, bad_steps=3),
    )
    assert [report.step for report in await harness.run()] == [4, 5]
    assert harness.progress.bad_steps == 0
    outcomes = [discarded_group(0), trainable_group(1, logprob=NAN)]
    harness = LearnerHarness(
        compute, outcomes, batch_size=1, max_bad_steps=3, progress=LearnerProgress(step=3, bad_steps=3)
    )
    with pytest.raises(DivergenceError, match="4 consecutive updates"):
        await harness.learner.run()


async def test_remaining_groups_form_a_smaller_last_batch(compute: Compute) -> None:
    """Every scored group is used or discarded with a reason."""
    reports = await LearnerHarness(compute, [trainable_group(group_id) for group_id in range(5)]).run()
    assert [len(report.trained) for report in reports] == [2, 2, 1]


async def test_a_duplicate_group_ends_the_run(compute: Compute) -> None:
    """The group accounting would be wrong afterwards."""
    with pytest.raises(ValueError, match="group 0 has already ended"):
        await LearnerHarness(compute, [trainable_group(0), trainable_group(0)]).learner.run()


async def test_a_learner_without_a_report_reader_continues(compute: Compute) -> None:
    """A missing reader of updates is a failure instead."""
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1)])
    harness.report_inbox.close()
    await harness.learner.run()
    assert harness.progress.step == 1
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1)])
    harness.update_inboxes[1].close()
    with pytest.raises(QueueClosed, match=r"updates\.other"):
        await harness.learner.run()


async def test_a_learner_closes_all_its_ends_in_every_case(compute: Compute) -> None:
    """Readers receive the end, and writers get QueueClosed."""
    harness = LearnerHarness(compute, [trainable_group(0)] * 2)
    with pytest.raises(ValueError, match="already ended"):
        await harness.learner.run()
    for reader in (*harness.update_inboxes, harness.report_inbox):
        with pytest.raises(EndOfStream):
            await reader.receive()
    with pytest.raises(QueueClosed):
        harness.replacements.put(1)


class Repeating(UpdateHook):
    """Adds the groups of the batch before, and notes what it is told."""

    def __init__(self) -> None:
        self.trained: list[ScoredGroup] = []
        self.told: list[tuple[list[int], list[int], int]] = []

    def extra(self, *, step: int, version: int) -> list[ScoredGroup]:
        return self.trained

    def ended(self, trained: Sequence[TrainedGroup], discarded: Sequence[Discarded], *, version: int) -> None:
        self.trained = [group.scored for group in trained]
        ids = [group.group.prompt.group_id for group in self.trained]
        self.told.append((ids, [group.prompt.group_id for group in discarded], version))


async def test_groups_of_a_hook_are_trained_on_beside_the_batch_and_end_once(compute: Compute) -> None:
    """The hook is told how every group has ended, under the version after the update."""
    outcomes = [trainable_group(0), trainable_group(1), trainable_group(2), discarded_group(3)]
    hook = Repeating()
    harness = LearnerHarness(compute, outcomes, hooks=[hook])
    reports = await harness.run()
    assert [report.replayed for report in reports] == [0, 2]
    assert [report.update.trained_tokens for report in reports if report.update] == [10, 15]
    assert hook.told == [([0, 1], [], 1), ([2], [3], 2)]
    assert harness.ledger.balance(prompted=4, carried_over=0).holds


async def test_an_update_carries_the_parts_of_its_moment(compute: Compute) -> None:
    """Each is asked for after the batch that the update reports."""
    hook = Repeating()
    outcomes = [trainable_group(group_id) for group_id in range(4)]

    def parts() -> dict[str, Part[object]]:
        return {"told": Part(value=tuple(hook.told))}

    harness = LearnerHarness(compute, outcomes, hooks=[hook], parts=parts)
    await harness.run()
    updates = await receive_all(harness.update_inboxes[0])
    assert [update.parts["told"].value for update in updates] == [tuple(hook.told[:1]), tuple(hook.told)]


async def test_a_cancelled_update_ends_no_group(compute: Compute) -> None:
    """The update is abandoned as a whole. A resumed run prompts its groups again."""
    harness, gate = LearnerHarness(compute, [trainable_group(0), trainable_group(1)]), threading.Event()
    compute.learner.submit(gate.wait)
    await cancel_when_blocked(harness.learner.run)
    gate.set()
    compute.learner.submit(lambda: None).result()
    assert (harness.policy_learner.version, harness.progress.step) == (0, 0)
    assert list(harness.ledger.unended(2)) == [0, 1]
    for reader in (*harness.update_inboxes, harness.report_inbox):
        with pytest.raises(EndOfStream):
            await reader.receive()


async def test_a_stopped_compute_thread_is_a_failure_of_the_learner(compute: Compute) -> None:
    """No group of the batch ends."""
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1)])
    compute.stop()
    with pytest.raises(ExecutorStoppedError):
        await harness.learner.run()
    assert list(harness.ledger.unended(2)) == [0, 1]


async def test_the_first_groups_are_sent_before_the_first_update(compute: Compute) -> None:
    """Once, as many as a batch has; their reports follow."""
    harness = LearnerHarness(compute, [trainable_group(number) for number in range(4)], first_check_seconds=20.0)
    assert [report.step for report in await harness.run()] == [1, 2]
    (first,) = harness.first_batches
    assert [group.group.prompt.group_id for group in first.groups if isinstance(group, ScoredGroup)] == [0, 1]


async def test_the_first_update_waits_until_the_monitor_has_checked_its_groups(compute: Compute) -> None:
    """The monitor then puts the number of logged steps. Discarded groups count."""
    harness = LearnerHarness(compute, [discarded_group(0), trainable_group(1)], first_check_seconds=20.0)
    harness.logged = harness.learner._logged = Latest[int]("unchecked")
    with fail_after(20):
        async with create_task_group() as tasks:
            tasks.start_soon(harness.learner.run)
            first = await harness.report_inbox.receive()
            await wait_all_tasks_blocked()
            assert isinstance(first, FirstBatch)
            assert (len(first.groups), harness.policy_learner.version) == (2, 0)
            harness.logged.put(0)
            assert [report.step for report in await receive_all(harness.report_inbox)] == [1]


async def test_a_monitor_that_does_not_answer_delays_the_first_update_for_a_limited_time(compute: Compute) -> None:
    """The update follows without the check."""
    harness = LearnerHarness(compute, [trainable_group(0), trainable_group(1)], first_check_seconds=0.01)
    harness.learner._logged = Latest[int]("unchecked")
    assert [report.step for report in await harness.run()] == [1]


async def test_batches_in_which_every_reward_fails_end_the_sampling(compute: Compute) -> None:
    """Once, with the cause. What arrives afterwards is still counted, and each batch is a step."""
    harness = LearnerHarness(compute, [discarded_group(number) for number in range(9)], max_failed_batches=3)
    reports = await harness.run()
    assert len(harness.causes) == 1
    assert "learner.max_failed_batches" in harness.causes[0]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    assert harness.ledger.balance(prompted=9, carried_over=0).holds


async def test_equal_rewards_of_environments_end_the_sampling(compute: Compute) -> None:
    """Batches of environments have only groups to train on: as many others as a batch has groups count as one."""
    equal = [replace(discarded_group(number), reason="zero_variance") for number in range(7)]
    groups = [*equal[:3], trainable_group(8), *equal[3:]]
    harness = LearnerHarness(compute, groups, max_equal_batches=2, from_environments=True)
    await harness.run()
    assert len(harness.causes) == 1
