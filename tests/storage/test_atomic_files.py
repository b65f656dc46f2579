"""Syncs to disk, the write cache of the drive included."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clotho.storage.atomic_files import make_directory, new_directory, replace_file, sync
from training_run.directory.jsonl import sync_files

F_FULLFSYNC = 51
"""The command of `fcntl` on macOS."""


@pytest.fixture
def full_syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate macOS: record the inodes of F_FULLFSYNC calls."""
    inodes: list[int] = []

    def record(descriptor: int, command: int) -> int:
        assert command == F_FULLFSYNC
        inodes.append(os.fstat(descriptor).st_ino)
        return 0

    simulate_macos(monkeypatch, record)
    return inodes


def simulate_macos(monkeypatch: pytest.MonkeyPatch, control: Callable[[int, int], int]) -> None:
    """Replace the name of the platform and `fcntl`."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)


def test_on_macos_every_sync_includes_the_write_cache_of_the_drive(tmp_path: Path, full_syncs: list[int]) -> None:
    """Files before their rename, histories, and the directories of both."""
    make_directory(tmp_path / "new")
    assert full_syncs == [tmp_path.stat().st_ino]
    full_syncs.clear()
    path = tmp_path / "file"
    replace_file(path, [b"content"])
    sync_files([path])
    assert full_syncs == [path.stat().st_ino, tmp_path.stat().st_ino, path.stat().st_ino]
    full_syncs.clear()
    with new_directory(tmp_path / "checkpoint"):
        pass
    assert full_syncs == [(tmp_path / "checkpoint").stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize(("code", "refused"), [(errno.ENOTSUP, False), (errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_without_full_syncs_is_synced_by_fsync(
    code: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network volumes of macOS do not know F_FULLFSYNC. Errors of the drive are raised."""
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
