"""The learner after collapse detection: rollback, stop and warning."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from attachments.alarms.messages import BaselineStatistics, CollapseState
from attachments.alarms.sections import CollapseSection, RollBackOnCollapse, StopOnCollapse, WarnOnCollapse
from clotho.lanes.compute_thread import Compute
from protocols.errors import CollapseError, DivergenceError
from tests.actors.actor_helpers import receive_all
from tests.actors.learner_harness import LearnerHarness, discarded_group, trainable_group
from tests.training import policies_and_groups

TOUCHY: dict[str, Any] = {"update_kl_high": 1e-9, "patience": 1}
"""Alarms that trip at every update."""


async def test_a_rollback_publishes_the_restored_weights_under_a_new_version(compute: Compute) -> None:
    """No version number is used twice.

    Groups of the collapsed policy are discarded, and the group accounting continues.
    """
    outcomes = [trainable_group(0), trainable_group(1), trainable_group(2, version=1), trainable_group(3, version=2)]
    collapse_detection = RollBackOnCollapse(**TOUCHY)
    harness = LearnerHarness(compute, outcomes, collapse_detection=collapse_detection)
    initial = harness.policy.trainable()
    first, second = await harness.run()
    update = await harness.update_inboxes[0].receive()
    assert (first.version, first.rolled_back, len(first.trained)) == (2, True, 2)
    assert "changed the policy" in first.collapse_findings[0].fact
    assert policies_and_groups.same_bits(update.parameters, initial)
    assert update.rollbacks == 1
    assert [drop.reason for drop in second.discarded] == ["stale"]
    assert harness.ledger.balance(prompted=4, carried_over=0).holds
    assert second.update
    assert second.update.learning_rate == pytest.approx(1e-2 * collapse_detection.rollback_rate)


@pytest.mark.parametrize(
    ("collapse_detection", "batches"),
    [(StopOnCollapse(**TOUCHY), 1), (RollBackOnCollapse(**TOUCHY, max_rollbacks=1), 2)],
)
async def test_a_collapse_ends_the_run_if_no_rollback_is_allowed(
    compute: Compute, collapse_detection: CollapseSection, batches: int
) -> None:
    """With the type `stop`, or after the last allowed rollback.

    The update is sent first, for the last checkpoint.
    """
    harness = LearnerHarness(
        compute,
        [trainable_group(group_id, version=group_id) for group_id in range(6)],
        collapse_detection=collapse_detection,
    )
    with pytest.raises(CollapseError, match="changed the policy"):
        await harness.learner.run()
    assert len(await receive_all(harness.update_inboxes[0])) == batches


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"collapse_detection": StopOnCollapse(**TOUCHY)}, CollapseError),
        ({"outcome": trainable_group(0, logprob=math.nan), "max_bad_steps": 1}, DivergenceError),
    ],
)
async def test_a_failing_run_waits_for_the_log_of_its_last_batch(
    compute: Compute, keys: dict[str, Any], error: type[Exception]
) -> None:
    """The failure would otherwise cancel the monitor before the line that shows the reason."""
    keys = {"outcome": trainable_group(0), **keys}
    harness = LearnerHarness(compute, [keys.pop("outcome")], batch_size=1, **keys)
    harness.logged.put(0)
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(error):
            await harness.learner.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await harness.report_inbox.receive()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        harness.logged.put(1)
    assert ended.is_set()


async def test_a_batch_without_an_update_does_not_count_as_healthy(compute: Compute) -> None:
    """Only applied updates count towards the rollback window."""
    outcomes = [
        trainable_group(0),
        trainable_group(1),
        discarded_group(2),
        discarded_group(3),
        discarded_group(4),
        discarded_group(5),
    ]
    harness = LearnerHarness(compute, outcomes, collapse_detection=RollBackOnCollapse())
    assert [report.version for report in await harness.run()] == [1, 1, 1]
    assert (
        compute.learner.submit(lambda: harness.policy_learner.state()["rollback.healthy_updates"].item()).result() == 1
    )


async def test_a_rollback_resets_the_count_of_bad_steps(compute: Compute) -> None:
    """Non-finite updates of the collapsed policy do not end the restored run."""
    collapse_state = CollapseState(baseline=BaselineStatistics(length=0.1))
    collapse_detection = RollBackOnCollapse(patience=1)
    outcomes = [trainable_group(0, logprob=math.nan), trainable_group(1, version=1)]
    harness = LearnerHarness(
        compute,
        outcomes,
        collapse_detection=collapse_detection,
        collapse_state=collapse_state,
        batch_size=1,
        max_bad_steps=1,
    )
    first, second = await harness.run()
    assert (first.rolled_back, first.update and first.update.update_applied) == (True, False)
    assert (second.version, len(second.trained), harness.progress.bad_steps) == (2, 1, 0)


async def test_a_warning_changes_no_weights(compute: Compute) -> None:
    """The report has the signs. Weights and versions equal those of a run without collapse detection."""
    outcomes = [trainable_group(group_id) for group_id in range(4)]
    warned = await LearnerHarness(compute, outcomes, collapse_detection=WarnOnCollapse(**TOUCHY)).run()
    silent = await LearnerHarness(compute, outcomes).run()
    assert all(report.collapse_findings for report in warned)
    assert not any(report.collapse_findings for report in silent)
    assert [report.fingerprint for report in warned] == [report.fingerprint for report in silent]
