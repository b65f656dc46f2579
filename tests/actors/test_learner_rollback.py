"""What the learner does when the alarms say that the policy collapses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from clotho.config.schema import CollapseDetectionSection
from clotho.config.sections_training import BufferedReplay
from clotho.runtime.compute_thread import ComputeExecutor
from protocols.collapse import BaselineStatistics, CollapseState
from protocols.errors import CollapseError, DivergenceError
from tests.actors.boxes import compute_thread, everything
from tests.actors.learner_scene import Scene, lost, taught
from tests.training import policies_and_groups


@pytest.fixture
def executor() -> Iterator[ComputeExecutor]:
    """A compute thread."""
    with compute_thread() as running:
        yield running


TOUCHY: dict[str, Any] = {"update_kl_high": 1e-9, "patience": 1}
"""Alarms that trip at every update."""


async def test_after_a_rollback_the_good_weights_are_a_new_version(executor: ComputeExecutor) -> None:
    """NullSampleLog is served an old version number; what the bad policy drew is discarded, and the books go on."""
    outcomes = [taught(0), taught(1), taught(2, version=1), taught(3, version=2)]
    alarms = CollapseDetectionSection(on_collapse="rollback", **TOUCHY)
    scene = Scene(executor, outcomes, alarms=alarms, replay=BufferedReplay(capacity=4))
    initial = scene.policy.trainable()
    first, second = await scene.run()
    update = await scene.told[0].receive()
    assert (first.version, first.rolled_back, len(first.trained)) == (2, True, 2)
    assert "changed the policy" in first.collapse_warnings[0]
    assert policies_and_groups.same_bits(update.parameters, initial)
    assert (update.rollbacks, update.replay) == (1, ())
    assert [drop.reason for drop in second.discarded] == ["stale"]
    assert scene.ledger.balance(prompted=4, carried_over=0).holds
    assert second.update
    assert second.update.learning_rate == pytest.approx(1e-2 * alarms.rollback_rate)


@pytest.mark.parametrize(("keys", "batches"), [({"on_collapse": "stop"}, 1), ({"on_collapse": "rollback"}, 2)])
async def test_a_collapse_that_must_not_be_ends_the_run(
    executor: ComputeExecutor, keys: dict[str, Any], batches: int
) -> None:
    """At once, or after the last rollback that is allowed; what was learned is told before, for the last checkpoint."""
    alarms = CollapseDetectionSection(**TOUCHY, max_rollbacks=1, **keys)
    scene = Scene(executor, [taught(group_id, version=group_id) for group_id in range(6)], alarms=alarms)
    with pytest.raises(CollapseError, match="changed the policy"):
        await scene.box.run()
    assert len(await everything(scene.told[0])) == batches


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"alarms": CollapseDetectionSection(on_collapse="stop", **TOUCHY)}, CollapseError),
        ({"outcome": taught(0, logprob=math.nan), "max_bad_steps": 1}, DivergenceError),
    ],
)
async def test_a_run_that_must_end_waits_until_its_last_batch_is_on_record(
    executor: ComputeExecutor, keys: dict[str, Any], error: type[Exception]
) -> None:
    """The failure would overtake the monitor, and the line that shows the reason would be missing."""
    keys = {"outcome": taught(0), **keys}
    scene = Scene(executor, [keys.pop("outcome")], batch_size=1, **keys)
    scene.recorded.put(0)
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(error):
            await scene.box.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await scene.reported.receive()
        await anyio.wait_all_tasks_blocked()
        assert not ended.is_set()
        scene.recorded.put(1)
    assert ended.is_set()


async def test_a_batch_without_an_update_proves_no_policy_good(executor: ComputeExecutor) -> None:
    """Nothing was learned and nothing was seen: what is gone back to has to earn it."""
    outcomes = [taught(0), taught(1), lost(2), lost(3), lost(4), lost(5)]
    scene = Scene(executor, outcomes, alarms=CollapseDetectionSection(on_collapse="rollback"))
    assert [report.version for report in await scene.run()] == [1, 1, 1]
    assert executor.submit(lambda: scene.learned.state()["rollback.healthy_updates"].item()).result() == 1


async def test_after_a_rollback_bad_updates_are_counted_anew(executor: ComputeExecutor) -> None:
    """What was not finite came of the policy that was given up: it must not end the run that has just been saved."""
    remembered = CollapseState(baseline=BaselineStatistics(length=0.1))
    alarms = CollapseDetectionSection(on_collapse="rollback", patience=1)
    outcomes = [taught(0, logprob=math.nan), taught(1, version=1)]
    scene = Scene(executor, outcomes, alarms=alarms, remembered=remembered, batch_size=1, max_bad_steps=1)
    first, second = await scene.run()
    assert (first.rolled_back, first.update and first.update.update_applied) == (True, False)
    assert (second.version, len(second.trained), scene.progress.bad_steps) == (2, 1, 0)


async def test_a_warning_changes_nothing(executor: ComputeExecutor) -> None:
    """The report has the signs; weights and versions are those of a run without alarms."""
    outcomes = [taught(group_id) for group_id in range(4)]
    warned = await Scene(executor, outcomes, alarms=CollapseDetectionSection(on_collapse="warn", **TOUCHY)).run()
    silent = await Scene(executor, outcomes).run()
    assert all(report.collapse_warnings for report in warned)
    assert not any(report.collapse_warnings for report in silent)
    assert [report.fingerprint for report in warned] == [report.fingerprint for report in silent]
