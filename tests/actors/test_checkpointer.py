"""The checkpointer writes a checkpoint every `interval` steps and after the last update."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog

from actors import checkpointer as module
from clotho.storage.adapters import read_adapter
from protocols.checkpoint import Part
from protocols.errors import RunDirectoryError
from protocols.queues import QueueClosed
from tests.actors.actor_helpers import filled_queue
from tests.actors.checkpointer_harness import Kept, checkpointer_of, parameters, update
from tests.training.policies_and_groups import same_bits
from tests.training_run.directory.made_checkpoints import ADAPTER, names, state
from training_run.directory.checkpoint_parts import CheckpointParts, Keeper
from training_run.directory.checkpoints import find_damage, read_checkpoint, recorded_newest


@pytest.mark.parametrize(
    ("interval", "steps", "kept"),
    [(2, 5, [2, 4, 5]), (2, 4, [2, 4]), (0, 3, [3]), (10, 3, [3]), (1, 6, [4, 5, 6]), (1, 0, [])],
)
async def test_due_and_final_checkpoints_are_written(
    tmp_path: Path, interval: int, steps: int, kept: list[int]
) -> None:
    """A checkpoint every `interval` steps and one at the end, without duplicates.

    The newest three are kept. The final adapter is that of the last checkpoint.
    """
    updates = filled_queue("updates", [update(step) for step in range(1, steps + 1)])
    await checkpointer_of(tmp_path, updates, interval=interval).run()
    found = names(tmp_path / "checkpoints") if kept else []
    assert found == [f"step-{step:06d}" for step in kept]
    for step in kept:
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        checkpoint = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER)
        assert checkpoint.state == state(step)
        assert same_bits(checkpoint.parameters, parameters(float(step)))
        assert same_bits(checkpoint.optimizer, parameters(-float(step)))
        part = CheckpointParts(checkpoint.parts).saved("one", Kept)
        assert part is not None
        assert part.value.step == step
    for directory in ("adapters", "elsewhere"):
        adapter = read_adapter(tmp_path / directory, parameters(), ADAPTER)
        assert same_bits(adapter, parameters(float(steps))), "of a run without updates: as it was found"


class Counting(Keeper[Kept]):
    """Adds the numbers of all updates."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, value: Kept) -> None:
        self.total += value.step

    def whole(self, value: Kept) -> Part[Kept]:
        return Part(value=Kept(step=self.total))


async def test_a_large_part_is_built_from_the_small_parts_of_all_updates(tmp_path: Path) -> None:
    """Those of steps without a checkpoint too."""
    parts = CheckpointParts({})
    parts.save("one", lambda: None, keeper=Counting())
    updates = filled_queue("updates", [update(step) for step in range(1, 6)])
    await checkpointer_of(tmp_path, updates, parts=parts, interval=3).run()
    for step, total in ((3, 6), (5, 15)):
        path = tmp_path / "checkpoints" / f"step-{step:06d}"
        found = read_checkpoint(path, expected=parameters(), adapter_config=ADAPTER).parts
        assert msgspec.msgpack.decode(found["one"].value, type=Kept) == Kept(step=total)


async def test_a_checkpoint_has_the_profile_and_the_metrics_of_its_step(tmp_path: Path) -> None:
    """As files of the manifest, for a reader of a checkpoint that was copied; a step without metrics has none."""
    lines = [f'{{"step": {step}, "loss": 0.{step}}}' for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4', ""]))
    updates = filled_queue("updates", [update(step) for step in (2, 4)])
    await checkpointer_of(tmp_path, updates, interval=2).run()
    first, second = (tmp_path / "checkpoints" / name for name in ("step-000002", "step-000004"))
    assert (first / "metrics.json").read_text() == '{"step": 2, "loss": 0.2}\n'
    assert not (second / "metrics.json").exists()
    for path in (first, second):
        assert (path / "profile.toml").read_text() == "steps = 9"
        assert find_damage(path) is None
    (first / "profile.toml").write_text("steps = 8")
    assert find_damage(first) == "profile.toml does not match MANIFEST.json"


async def test_a_checkpoint_waits_for_the_logs_of_its_step(tmp_path: Path) -> None:
    """A run that is killed after the checkpoint has a log line for every group of the step."""
    updates = filled_queue("updates", [update(2)])
    checkpointer = checkpointer_of(tmp_path, updates, logged=1, interval=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(checkpointer.run)
        await anyio.wait_all_tasks_blocked()
        assert not (tmp_path / "checkpoints").exists()
        checkpointer._logged.put(2)
    assert names(tmp_path / "checkpoints") == ["step-000002"]


async def test_the_logs_are_synced_before_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, the log files have the lines of every checkpoint that is on the disk."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        published = (tmp_path / "checkpoints" / "step-000002").exists()
        same = os.path.samestat(os.fstat(descriptor), metrics.stat())
        synced.append("logs" if same else "published" if published else "checkpoint")

    monkeypatch.setattr(os, "fsync", sync)
    await checkpointer_of(tmp_path, filled_queue("updates", [update(2)]), interval=1).run()
    assert synced[0] == "logs"
    assert synced.count("logs") == 1
    assert "checkpoint" in synced
    assert recorded_newest(tmp_path / ".newest_checkpoint") == 2


async def test_logs_that_cannot_be_synced_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is written: a resumed run reports what the log files lack."""

    def fail(paths: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "sync_files", fail)
    with structlog.testing.capture_logs() as logs:
        await checkpointer_of(tmp_path, filled_queue("updates", [update(2)]), interval=1).run()
    assert [line["event"] for line in logs] == ["log_files_not_synced", "checkpoint_written"]
    assert names(tmp_path / "checkpoints") == ["step-000002"]


async def test_a_failed_monitor_does_not_block_checkpoints(tmp_path: Path) -> None:
    """The checkpoint is written without the log lines."""
    checkpointer = checkpointer_of(tmp_path, filled_queue("updates", [update(2)]), logged=1)
    checkpointer._logged.close()
    await checkpointer.run()
    assert names(tmp_path / "checkpoints") == ["step-000002"]


async def test_a_blocked_monitor_delays_a_checkpoint_only_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit the checkpointer logs a warning and writes the checkpoint."""
    monkeypatch.setattr(module, "LOG_TIMEOUT_SECONDS", 0.01)
    with structlog.testing.capture_logs() as logs:
        await checkpointer_of(tmp_path, filled_queue("updates", [update(2)]), logged=1).run()
    assert [line["log_level"] for line in logs] == ["warning", "info"]
    assert names(tmp_path / "checkpoints") == ["step-000002"]


async def test_a_disk_error_ends_the_run(tmp_path: Path) -> None:
    """The OSError is raised and the inbox is closed."""
    (tmp_path / "checkpoints").write_text("a file stands in the way")
    updates = filled_queue("updates", [update(1)], ended=False)
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        await checkpointer_of(tmp_path, updates, interval=1).run()
    with pytest.raises(QueueClosed):
        updates.inbox()
    assert not (tmp_path / "adapters").exists()
