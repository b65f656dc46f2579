"""The connection to a Ray cluster: what is refused."""

from __future__ import annotations

import sys

import pytest

from clotho.cluster.connection import RayConnection
from clotho.config.sections_generation import RayCluster
from protocols.errors import ProfileError


async def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is an optional package."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProfileError, match=r"\[ray\]"):
        await RayConnection(RayCluster(address="local")).connect()
