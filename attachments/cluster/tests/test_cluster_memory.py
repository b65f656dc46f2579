"""Published weights in the estimate of memory."""

from __future__ import annotations

from attachments.cluster.sections import CLUSTER, RayCluster
from training_run.memory.estimate import estimate_memory
from training_run.profile.load import load_profile


def test_patches_for_a_cluster_keep_one_older_version() -> None:
    """Only of weights that are trained in full: adapters are published whole."""
    full, adapter = load_profile("local-m3", {"policy.method.type": "full"}), load_profile("local-m3")
    published = [estimate_memory(one.model, CLUSTER.put(one, RayCluster())) for one in (full, adapter)]
    assert [one.published for one in published] == [published[0].trained, 0]
    assert estimate_memory(full.model, full).published == 0
