"""Workers on a Ray cluster: they sample the rollouts of a run, and compute rewards."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attachments.cluster.sections import CLUSTER, RayCluster
from clotho.extension import attachment_names
from protocols.errors import ProfileError
from training_run.profile.rules import Rule

if TYPE_CHECKING:
    from training_run.memory.need import MemoryNeed
    from training_run.profile.schema import Profile
    from training_run.run import RunContext
    from training_run.start.startup import Attach, Plan


MAY_CHANGE = ("cluster",)
CONTRADICTIONS = (
    Rule(
        "cluster.address",
        lambda v, x: x.startswith("ray://"),
        '= "{}" is that of a Ray Client: the run must be on a machine of the cluster, with "auto" or HOST:PORT',
    ),
)


def slots(profile: Profile) -> Mapping[str, str]:
    """The sampler."""
    return {"sampler": 'cluster = "ray"'} if isinstance(CLUSTER.of(profile), RayCluster) else {}


def check(profile: Profile) -> None:
    """Raise ProfileError if Ray, or the attachment whose protocol workers speak, is not installed."""
    if not isinstance(CLUSTER.of(profile), RayCluster):
        return
    if "remote" not in attachment_names():
        raise ProfileError("cluster needs the attachment 'remote', which this installation lacks")
    if find_spec("ray") is None:
        raise ProfileError("cluster needs the package ray: pip install -e '.[ray]'")


def memory(need: MemoryNeed) -> None:
    """Keep the weights that were published last."""
    need.published = need.profile is not None and isinstance(CLUSTER.of(need.profile), RayCluster)


async def prepare(plan: Plan) -> Attach | None:
    """Make rewards start their workers on the cluster. The first of all workers connects to it."""
    settings = CLUSTER.of(plan.profile)
    if not isinstance(settings, RayCluster):
        return None
    from attachments.cluster.connection import RayConnection
    from attachments.cluster.reward_worker import ClusterRewards

    connection = RayConnection(settings)
    plan.ending.callback(connection.close)
    plan.workers["cluster"] = ClusterRewards(connection)
    plan.token_values = True

    async def attach(run: RunContext) -> None:
        from attachments.cluster.sampling import LocalEngine, RayWorkers
        from attachments.remote.sampling import add_sampler

        sampler = add_sampler(
            run,
            sync_interval=settings.sync_interval,
            patience_seconds=settings.patience_seconds,
            source=RayWorkers(run, settings, connection),
        )
        if settings.local_share:
            sampler.join(LocalEngine(run, sampler.fingerprints), share=settings.local_share)

    return attach
