"""Two whole runs that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct

from tests.e2e.running import Ended, run


class Finished(Struct, frozen=True, kw_only=True):
    """A run that ended well."""

    run_dir: Path
    ended: Ended
    steps: int


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The default, asynchronous run, of 6 updates."""
    run_dir = tmp_path_factory.mktemp("asynchronous") / "run"
    ended = run(run_dir, "--profile", "local-m3", "--steps", "6", "--checkpoint.interval", "2")
    assert ended.status == 0, ended
    return Finished(run_dir=run_dir, ended=ended, steps=6)


@pytest.fixture(scope="session")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The strictly on-policy run, of 6 updates, never interrupted."""
    run_dir = tmp_path_factory.mktemp("synchronous") / "run"
    ended = run(run_dir, "--steps", "6", "--async", "false")
    assert ended.status == 0, ended
    return Finished(run_dir=run_dir, ended=ended, steps=6)
