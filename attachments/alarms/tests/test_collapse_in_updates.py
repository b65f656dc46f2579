"""The collapse detection in the updates of a learner, and in the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from attachments.alarms import attachment
from attachments.alarms.collapse_detection import NAME, AlarmsState, BaselineStatistics, CollapseState
from attachments.alarms.hooks import CollapseHook, RollbackPolicy
from attachments.alarms.sections import CollapseChecks, RollBackOnCollapse, StopOnCollapse, WarnOnCollapse
from clotho.lanes.compute_thread import Compute
from clotho.training.update import PolicyLearner
from protocols.errors import CollapseError
from tests import model_lanes
from tests.actors.actor_helpers import compute_thread, receive_all
from tests.actors.learner_harness import LearnerHarness, discarded_group, trainable_group
from tests.training import policies_and_groups
from tests.training_run.built_context import open_context, tiny_profile
from tests.training_run.start.test_startup import write_step
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import read_parts
from training_run.run import RunContext
from training_run.supervision.hooks import UpdateHook

TOUCHY: dict[str, Any] = {"update_kl_high": 1e-9, "patience": 1}
"""Alarms that trip at every update."""


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Yield compute threads."""
    with compute_thread() as running:
        yield running


def detection(
    settings: CollapseChecks, *, state: CollapseState | None = None, hooks: list[CollapseHook] | None = None
) -> Callable[[PolicyLearner], UpdateHook]:
    """Return what makes the hook of these settings; hooks: receives it."""

    def made(learner: PolicyLearner) -> UpdateHook:
        rolls_back = isinstance(settings, RollBackOnCollapse)
        rollback = RollbackPolicy(learner.snapshot(), window=1) if rolls_back else None
        saved = AlarmsState(collapse=state or CollapseState())
        hook = CollapseHook(settings, saved, snapshot=learner.snapshot, rollback=rollback)
        if hooks is not None:
            hooks.append(hook)
        return hook

    return made


async def test_a_collapse_returns_to_the_last_healthy_policy(compute: Compute) -> None:
    """With the smaller learning rate of the settings. The part of a checkpoint counts the rollbacks."""
    outcomes = [trainable_group(0), trainable_group(1), trainable_group(2, version=2), trainable_group(3, version=2)]
    settings, hooks = RollBackOnCollapse(**TOUCHY), list[CollapseHook]()
    harness = LearnerHarness(compute, outcomes, hooks=[detection(settings, hooks=hooks)])
    initial = harness.policy.trainable()
    first, second = await harness.run()
    update = await harness.update_inboxes[0].receive()
    assert first.rolled_back
    assert "changed the policy" in first.collapse_findings[0].fact
    assert policies_and_groups.same_bits(update.parameters, initial)
    assert hooks[0].part().value.rollbacks == 2
    assert second.update
    assert second.update.learning_rate == pytest.approx(1e-2 * settings.rollback_rate)


@pytest.mark.parametrize(
    ("settings", "batches"), [(StopOnCollapse(**TOUCHY), 1), (RollBackOnCollapse(**TOUCHY, max_rollbacks=1), 2)]
)
async def test_a_collapse_ends_the_run_if_no_rollback_is_allowed(
    compute: Compute, settings: CollapseChecks, batches: int
) -> None:
    """With the type `stop`, or after the last allowed rollback.

    The update is sent first, for the last checkpoint.
    """
    outcomes = [trainable_group(group_id, version=group_id) for group_id in range(6)]
    harness = LearnerHarness(compute, outcomes, hooks=[detection(settings)])
    with pytest.raises(CollapseError, match="changed the policy"):
        await harness.learner.run()
    assert len(await receive_all(harness.update_inboxes[0])) == batches


async def test_a_batch_without_an_update_does_not_count_as_healthy(compute: Compute) -> None:
    """Only applied updates count towards the rollback window."""
    outcomes = [
        trainable_group(0), trainable_group(1), discarded_group(2), discarded_group(3), discarded_group(4),
        discarded_group(5),
    ]  # fmt: skip
    hooks = list[CollapseHook]()
    harness = LearnerHarness(compute, outcomes, hooks=[detection(RollBackOnCollapse(), hooks=hooks)])
    assert [report.version for report in await harness.run()] == [1, 1, 1]
    assert hooks[0].part().value.healthy_updates == 1


async def test_a_collapse_without_an_update_is_rolled_back_too(compute: Compute) -> None:
    """The weights may be those of a collapsed policy although the update was not finite."""
    state = CollapseState(baseline=BaselineStatistics(length=0.1))
    hook = detection(RollBackOnCollapse(patience=1), state=state)
    outcomes = [trainable_group(0, logprob=float("nan")), trainable_group(1, version=1)]
    harness = LearnerHarness(compute, outcomes, hooks=[hook], batch_size=1, max_bad_steps=1)
    first, _ = await harness.run()
    assert (first.rolled_back, first.update and first.update.update_applied) == (True, False)


async def test_a_warning_changes_no_weights(compute: Compute) -> None:
    """The report has the signs. Weights and versions equal those of a run without collapse detection."""
    outcomes = [trainable_group(group_id) for group_id in range(4)]
    warned = await LearnerHarness(compute, outcomes, hooks=[detection(WarnOnCollapse(**TOUCHY))]).run()
    silent = await LearnerHarness(compute, outcomes).run()
    assert all(report.collapse_findings for report in warned)
    assert not any(report.collapse_findings for report in silent)
    assert [report.fingerprint for report in warned] == [report.fingerprint for report in silent]


ROLLBACK = {"type": "rollback", "window": 1}


def alarms_of(run: RunContext) -> AlarmsState:
    """Return the statistics that a checkpoint of this moment keeps."""
    part = run.attached.parts.collect()[NAME]
    assert isinstance(part.value, AlarmsState)
    return part.value


def train(run: RunContext) -> None:
    """Let the learner train on two batches, which look healthy."""
    (hook,) = (hook for hook in run.attached.hooks if isinstance(hook, CollapseHook))
    hook.rollbacks = 2
    for seed in range(2):
        groups = policies_and_groups.random_groups(run.policy.vocab_size, seed=seed)
        run.compute.learner.submit(lambda: run.policy_learner.update(groups)).result()  # noqa: B023
        assert hook._rollback is not None
        hook._rollback.observe(run.policy_learner.snapshot(), healthy=True)


async def test_a_resumed_run_continues_with_the_statistics_and_the_healthy_policy(tmp_path: Path) -> None:
    """The arrays of its part equal those that were saved, and any thread can read them."""
    profile = tiny_profile(tmp_path, collapse_detection=ROLLBACK)
    saved: list[dict[str, Any]] = []

    def act(run: RunContext) -> None:
        train(run)
        saved.append(dict(run.attached.parts.collect()[NAME].arrays))

    await write_step(profile, act=act)
    async with open_context(profile, resume=True) as run:
        assert (alarms_of(run).rollbacks, alarms_of(run).healthy_updates) == (2, 2)
        arrays = dict(run.attached.parts.collect()[NAME].arrays)
        assert policies_and_groups.same_bits(arrays, saved[0])
        read = run.compute.decode.submit(lambda: [model_lanes.numpy(array) for array in arrays.values()])
        assert len(read.result(60)) == len(arrays)


async def test_a_fork_with_another_optimizer_keeps_new_policies(tmp_path: Path) -> None:
    """With a warning. A fork that was killed before its next checkpoint resumes in the same way."""
    await write_step(tiny_profile(tmp_path, collapse_detection=ROLLBACK), act=train)
    profile = tiny_profile(
        tmp_path, run_dir=str(tmp_path / "fork"), collapse_detection=ROLLBACK, learner={"optimizer": "lion"}
    )
    with structlog.testing.capture_logs() as logs:
        async with open_context(profile, fork=tmp_path / "run" / "checkpoints" / "step-000003") as run:
            assert (alarms_of(run).rollbacks, alarms_of(run).healthy_updates) == (2, 0)
        async with open_context(profile, resume=True) as run:
            assert alarms_of(run).healthy_updates == 0
    assert [line["event"] for line in logs].count("rollback_starts_anew") == 2


async def test_a_run_that_switches_the_detection_off_keeps_its_statistics(tmp_path: Path) -> None:
    """For a later start that switches it on again. It keeps no policies."""
    await write_step(tiny_profile(tmp_path, collapse_detection=ROLLBACK), act=train)
    async with open_context(tiny_profile(tmp_path, collapse_detection="off"), resume=True) as run:
        assert not any(isinstance(hook, CollapseHook) for hook in run.attached.hooks)
        part = run.attached.parts.collect()[NAME]
        assert part.value == AlarmsState(rollbacks=2)
        assert not part.arrays


async def test_updates_are_measured_only_for_the_detection(tmp_path: Path) -> None:
    """A measurement takes up to a quarter of an update."""
    for setting, measured in (("off", False), ("warn", True)):
        profile = tiny_profile(tmp_path, run_dir=str(tmp_path / setting), collapse_detection=setting)
        async with open_context(profile) as run:
            groups = policies_and_groups.random_groups(run.policy.vocab_size)
            update = run.compute.learner.submit(lambda: run.policy_learner.update(groups)).result()  # noqa: B023
            assert (update.metrics.update_kl is not None) == measured


async def test_a_checkpoint_is_described_with_its_rollbacks(tmp_path: Path) -> None:
    """There are none in a checkpoint without the part."""
    profile = tiny_profile(tmp_path, collapse_detection=ROLLBACK)
    state = await write_step(profile, act=train)
    parts = read_parts(tmp_path / "run" / "checkpoints" / f"step-{state.step:06}", with_arrays=False)
    assert attachment.described(CheckpointParts(parts)) == {"rollbacks": 2}
    assert attachment.described(CheckpointParts({})) == {"rollbacks": 0}
