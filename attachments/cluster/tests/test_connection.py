"""What a run on a Ray cluster needs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from attachments.cluster import attachment
from attachments.cluster.connection import ENVIRONMENT, LOCAL, ONE_MACHINE, RayConnection
from attachments.cluster.messages import RESOURCE
from attachments.cluster.sections import RayCluster
from protocols.errors import ProfileError
from tests.test_layering import PROGRAM, files
from tests.training_run.built_context import tiny_profile


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is an optional package. A run without a cluster is not refused."""
    monkeypatch.setitem(sys.modules, "ray", None)
    attachment.check(tiny_profile(tmp_path))
    with pytest.raises(ProfileError, match=r"\[ray\]"):
        attachment.check(tiny_profile(tmp_path, cluster="ray"))


def test_without_the_attachment_of_inference_servers_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers speak the protocol of inference servers."""
    monkeypatch.setattr("attachments.cluster.attachment.attachment_names", lambda: ("cluster",))
    attachment.check(tiny_profile(tmp_path))
    with pytest.raises(ProfileError, match="'remote'"):
        attachment.check(tiny_profile(tmp_path, cluster="ray"))


def test_a_run_without_a_cluster_needs_no_ray() -> None:
    """No module imports it when it is imported itself."""
    texts = {path: path.read_text(encoding="utf-8") for path in files(*PROGRAM)}
    assert any("import ray" in text for text in texts.values())
    assert [path for path, text in texts.items() if re.search(r"^(?:import|from) ray\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (RayCluster(address=LOCAL, workers=3), {"address": LOCAL, "resources": {RESOURCE: 3.0}}),
        (RayCluster(address="10.0.0.1:6379", workers=3), {"address": "10.0.0.1:6379", "resources": None}),
    ],
    ids=["local", "remote"],
)
async def test_a_cluster_on_this_machine_has_room_for_its_workers(
    settings: RayCluster, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs elsewhere has its own resources. A failure to connect is one line."""
    import ray

    found = dict[str, Any]()

    def init(*, address: str, resources: dict[str, float] | None = None, **_: Any) -> None:
        found.update(address=address, resources=resources)
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", init)
    for name in ENVIRONMENT | ONE_MACHINE:
        monkeypatch.setenv(name, "")
    with pytest.raises(ProfileError):
        await RayConnection(settings).connect()
    assert found == expected
