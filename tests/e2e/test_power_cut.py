"""A run whose machine loses power at any instant resumes and loses no group."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.e2e.pipeline_process import RunResult, resume_flag, run
from tests.e2e.test_kill import adapter_settings, check_result
from tests.training_run.directory.power_cut.simulated_disk import (
    RECORDABLE,
    Change,
    SimulatedDisk,
    build_recorder,
    read_journal,
    recording,
)
from training_run.directory.checkpoints import latest_checkpoint, read_state

pytestmark = [pytest.mark.slow, *RECORDABLE]

STEPS = 20
FLAGS = ("--steps", str(STEPS), "--checkpoint.interval", "1")


class PowerCuts:
    """Recorded runs, and the directories that power cuts leave. Each directory has the run directory `run`."""

    def __init__(self, tmp_path: Path, *flags: str) -> None:
        self._tmp_path, self._flags = tmp_path, flags
        self._library = build_recorder(tmp_path)
        self.checkpoints: list[int] = []
        """Step of the newest checkpoint after each cut."""

    def run(self, directory: Path) -> tuple[RunResult, list[Change]]:
        """Start or resume the run and record its changes below the directory."""
        journal = self._tmp_path / "journal"
        journal.unlink(missing_ok=True)
        environment = recording(self._library, directory, journal)
        result = run(directory / "run", *self._flags, *resume_flag(directory / "run"), environment=environment)
        return result, read_journal(journal)

    def resume(self, directory: Path) -> RunResult:
        """Resume the run, or start it if nothing of it had reached the disk."""
        return run(directory / "run", *self._flags, *resume_flag(directory / "run"))

    def cut(self, disk: SimulatedDisk, changes: Iterable[Change], target: Path, *, seed: int) -> None:
        """Write what a power cut after these changes leaves, and check that it has the reported checkpoints."""
        reported = 0
        for change in changes:
            disk.apply(change)
            if change.kind == "r" and change.second.endswith("/run/.newest_checkpoint"):
                reported += 1
        disk.after_cut(target, seed)
        found = latest_checkpoint(target / "run" / "checkpoints")
        assert found.warnings == ()
        step = read_state(found.path).step if found.path else 0
        assert step >= reported, "the file is renamed after each checkpoint"
        self.checkpoints.append(step)


def first(changes: list[Change], share: float) -> list[Change]:
    """Return the first part of the changes."""
    return changes[: int(share * len(changes))]


@pytest.mark.parametrize("mode", ["false", "true"])
def test_power_cuts_lose_no_group(tmp_path: Path, mode: str, record_property: Callable[[str, object], None]) -> None:
    """25 cuts in each mode, five of them followed by another cut after the resume.

    Every group ends exactly once, and the histories equal the group accounting without a warning. Synchronous runs
    end with the bytes of the uninterrupted run.
    """
    cuts = PowerCuts(tmp_path, *FLAGS, "--async", mode)
    whole = tmp_path / "whole"
    whole.mkdir()
    result, changes = cuts.run(whole)
    check_result(whole / "run", result, steps=STEPS)
    chance = random.Random(mode)
    for seed in range(20):
        directory = tmp_path / f"cut-{seed}"
        cuts.cut(SimulatedDisk(whole, empty=True), first(changes, chance.random()), directory, seed=seed)
        if seed % 4 == 3:
            disk = SimulatedDisk(directory)
            _, later = cuts.run(directory)
            again = tmp_path / f"cut-{seed}-again"
            cuts.cut(disk, first(later, chance.random()), again, seed=seed)
            shutil.rmtree(directory)
            directory = again
        result = cuts.resume(directory)
        check_result(directory / "run", result, steps=STEPS)
        if mode == "false":
            tensors = (path / "run/adapters/adapters.safetensors" for path in (directory, whole))
            assert len({path.read_bytes() for path in tensors}) == 1
            assert adapter_settings(directory / "run") == adapter_settings(whole / "run")
        shutil.rmtree(directory)
    assert len(cuts.checkpoints) == 25
    record_property("resumed_from_steps", cuts.checkpoints)
