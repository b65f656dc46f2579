"""The connection to a Ray cluster: what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attachments.cluster.connection import RayConnection
from attachments.remote.attachment import RayCluster
from protocols.errors import ProfileError

ROOT = Path(__file__).parents[3]


async def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is an optional package."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProfileError, match=r"\[ray\]"):
        await RayConnection(RayCluster(address="local")).connect()


def test_a_run_without_a_cluster_needs_no_ray() -> None:
    """The program is imported with an environment in which Ray is not installed."""
    code = "import sys; sys.modules['ray'] = None; import pipeline"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
