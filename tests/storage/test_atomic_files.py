"""Syncs to disk, and the write cache of the drive."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clotho.storage.atomic_files import F_BARRIERFSYNC, make_directory, new_directory, replace_file, sync, write_file
from training_run.directory.jsonl import sync_files

F_FULLFSYNC = 51
"""The command of `fcntl` on macOS."""


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Simulate macOS: record the inodes and the commands of syncs."""
    found: list[tuple[int, int]] = []

    def record(descriptor: int, command: int) -> int:
        found.append((os.fstat(descriptor).st_ino, command))
        return 0

    simulate_macos(monkeypatch, record)
    return found


def simulate_macos(monkeypatch: pytest.MonkeyPatch, control: Callable[[int, int], int]) -> None:
    """Replace the name of the platform and `fcntl`."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)


def test_on_macos_a_sync_keeps_the_order_and_only_a_checkpoint_empties_the_cache_of_the_drive(
    tmp_path: Path, synced: list[tuple[int, int]]
) -> None:
    """A flush contains everything that was synced before it. It comes when a checkpoint has its name."""

    def inode(path: Path) -> int:
        return path.stat().st_ino

    make_directory(tmp_path / "new")
    assert synced == [(inode(tmp_path), F_BARRIERFSYNC)]
    synced.clear()
    path = tmp_path / "file"
    replace_file(path, [b"content"])
    sync_files([path])
    assert synced == [(inode(one), F_BARRIERFSYNC) for one in (path, tmp_path, path)]
    synced.clear()
    with new_directory(tmp_path / "checkpoint") as unfinished:
        write_file(unfinished / "weights", [b"content"])
    complete = tmp_path / "checkpoint"
    assert synced == [
        (inode(complete / "weights"), F_BARRIERFSYNC), (inode(complete), F_BARRIERFSYNC), (inode(tmp_path), F_FULLFSYNC)
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "refused"), [(errno.ENOTSUP, False), (errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_without_barriers_is_synced_by_fsync(
    code: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network volumes of macOS know neither barriers nor flushes. Errors of the drive are raised."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def fail(descriptor: int, command: int) -> int:
        raise OSError(code, os.strerror(code))

    simulate_macos(monkeypatch, fail)
    with (tmp_path / "file").open("wb") as file:
        if refused:
            with pytest.raises(OSError, match=os.strerror(code)):
                sync(file.fileno())
        else:
            sync(file.fileno())
        assert synced == [file.fileno()]
