"""The replay buffer in the updates of a learner, and in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from attachments.replay.replay import Replay, ReplayBuffer, ReplayGroup, ReplayState
from attachments.replay.sections import BufferedReplay
from clotho.lanes.compute_thread import Compute
from protocols.checkpoint import Part
from tests.actors.actor_helpers import compute_thread
from tests.actors.learner_harness import LearnerHarness, discarded_group, trainable_group
from tests.training.policies_and_groups import scored_group
from tests.training_run.built_context import open_context, tiny_profile
from tests.training_run.directory.made_checkpoints import ADAPTER, parameters, snapshot
from training_run.directory.checkpoint_parts import CheckpointParts
from training_run.directory.checkpoints import read_checkpoint, write_checkpoint

NAN = float("nan")


@pytest.fixture
def compute() -> Iterator[Compute]:
    """Yield compute threads."""
    with compute_thread() as running:
        yield running


def replay(*, capacity: int, groups: int = 4) -> Replay:
    """Return an empty buffer."""
    return Replay(ReplayBuffer(BufferedReplay(capacity=capacity, groups=groups), seed=0))


async def test_replayed_groups_are_trained_on_beside_the_batch_and_end_once(compute: Compute) -> None:
    """From the second update on. A group enters the buffer after its update and ends once in the group accounting."""
    outcomes = [trainable_group(group_id) for group_id in range(6)]
    hook = replay(capacity=3, groups=2)
    harness = LearnerHarness(compute, outcomes, hooks=[hook])
    reports = await harness.run()
    assert [report.replayed for report in reports] == [0, 2, 2]
    tokens = [report.update.trained_tokens for report in reports if report.update]
    assert tokens == [10, 20, 20]
    assert [len(report.trained) for report in reports] == [2, 2, 2]
    assert harness.ledger.balance(prompted=6, carried_over=0).holds
    kept = hook.buffer.groups()
    assert [(one.scored.group.prompt.group_id, one.version) for one in kept] == [(3, 2), (4, 3), (5, 3)]
    plain = await LearnerHarness(compute, outcomes).run()
    assert plain[0].fingerprint == reports[0].fingerprint
    assert plain[1].fingerprint != reports[1].fingerprint


async def test_batches_without_trainable_groups_do_not_use_replay(compute: Compute) -> None:
    """Such a batch is a step without an update, and adds no group to the buffer."""
    outcomes = [
        trainable_group(0), trainable_group(1), discarded_group(2), discarded_group(3), trainable_group(4, logprob=NAN),
        discarded_group(5),
    ]  # fmt: skip
    hook = replay(capacity=8)
    reports = await LearnerHarness(compute, outcomes, hooks=[hook]).run()
    assert [(report.version, report.replayed) for report in reports] == [(1, 0), (1, 0), (1, 2)]
    assert [kept.scored.group.prompt.group_id for kept in hook.buffer.groups()] == [0, 1]


async def test_a_rollback_empties_the_buffer(compute: Compute) -> None:
    """A group of an update that was taken back is not replayed, and a checkpoint has no part without groups."""
    hook = replay(capacity=8)
    await LearnerHarness(compute, [trainable_group(0), trainable_group(1)], hooks=[hook]).run()
    assert hook.part() is not None
    hook.rolled_back()
    assert hook.part() is None


def test_a_checkpoint_keeps_every_group_exactly(tmp_path: Path) -> None:
    """With log-probabilities, supports and parts of rewards."""
    first, second = (
        ReplayGroup(
            scored=replace(
                scored_group([[1, 2], [3]], [0.1 + 0.2, -1e-300], logprob=-1 / 3, version=7, group_id=group_id),
                parts={"exact": (None, 1.0)},
                token_advantages=((0.1, 1e308), (5e-324,)),
            ),
            advantage=2 / 3,
            version=group_id,
        )
        for group_id in (4, 11)
    )
    supported = replace(first.scored.group.completions[0], supports=(b"\x00\xff\x00\x00", b""))
    group = replace(first.scored.group, completions=(supported, first.scored.group.completions[1]))
    first = replace(first, scored=replace(first.scored, group=group))
    part = Part(value=ReplayState(groups=(first, second)))
    path = write_checkpoint(tmp_path, replace(snapshot(1), parts={"replay": part}), keep_last=3)
    found = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
    saved = CheckpointParts(found.parts).saved("replay", ReplayState)
    assert saved is not None
    assert saved.value == part.value


async def test_a_run_replays_only_if_its_settings_say_so(tmp_path: Path) -> None:
    """Without a buffer, nothing of it takes part in the run."""
    async with open_context(tiny_profile(tmp_path)) as run:
        assert not any(isinstance(hook, Replay) for hook in run.attached.hooks)
        assert "replay" not in run.attached.parts.collect()
    with_buffer = tiny_profile(tmp_path, run_dir=str(tmp_path / "other"), replay={"type": "buffer"})
    async with open_context(with_buffer) as run:
        assert any(isinstance(hook, Replay) for hook in run.attached.hooks)
