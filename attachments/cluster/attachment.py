"""Workers on a Ray cluster: they sample the rollouts of a run, and compute rewards."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from attachments.remote.attachment import RayCluster
from protocols.errors import ProfileError
from training_run.attachment import Attach, Attachment, Plan

if TYPE_CHECKING:
    from training_run.profile.schema import Profile
    from training_run.run import RunContext


class Cluster(Attachment):
    """`cluster = "ray"` of a profile."""

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """The sampler."""
        return {"sampler": 'cluster = "ray"'} if isinstance(profile.cluster, RayCluster) else {}

    def check(self, profile: Profile) -> None:
        """Raise ProfileError if Ray is not installed."""
        if isinstance(profile.cluster, RayCluster) and find_spec("ray") is None:
            raise ProfileError("cluster needs the package ray: pip install -e '.[ray]'")

    async def prepare(self, plan: Plan) -> Attach | None:
        """Make rewards start their workers on the cluster. The first of all workers connects to it."""
        settings = plan.profile.cluster
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

            sampler = add_sampler(run, settings, source=RayWorkers(run, settings, connection))
            if settings.local_share:
                sampler.join(LocalEngine(run, sampler.fingerprints), share=settings.local_share)

        return attach


ATTACHMENT = Cluster()
