"""The servers of a run whose rollouts are sampled by workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyio.to_thread import run_sync

from attachments.cluster.connection import RayConnection
from attachments.cluster.messages import EngineWorkerSettings
from attachments.cluster.ray_worker import PublishedWeights, RayWorker
from attachments.cluster.sections import RayCluster
from attachments.remote.messages import RolloutAnswer, ServedPolicy
from attachments.remote.place import InferenceServer
from attachments.remote.server import RemoteFailure, Traffic
from attachments.remote.weights import Weights
from clotho.models.parameters import layout
from protocols.errors import GenerationError
from protocols.sampling import SampleRequest
from training_run.run import RunContext


class RayWorkers:
    """The workers of a cluster, as they join. The first call connects to the cluster."""

    def __init__(self, run: RunContext, settings: RayCluster, connection: RayConnection) -> None:
        self._connection = connection
        self._settings, self._run_id = settings, run.directory.run_id
        profile = run.profile
        self._worker = EngineWorkerSettings(
            model=profile.model,
            policy=profile.policy,
            sampling=profile.sampling,
            engine=profile.engine,
            memory=profile.memory,
            seed=profile.seed,
        )
        start = Weights(ready=run.weights.value, parameters=run.policy_learner.parameters)
        self._weights = PublishedWeights(self._connection.put, start=None if run.policy.keeps_base else start)

    async def joined(self) -> Sequence[InferenceServer]:
        """Return the workers that have joined since the last call.

        Raises ProfileError without a cluster, and RemoteError if it has ended.
        """
        await self._connection.connect()
        await run_sync(self._connection.check)
        return [
            RayWorker(
                name,
                actor,
                weights=self._weights,
                run_id=self._run_id,
                timeout_seconds=self._settings.group_seconds,
            )
            for name, actor in await self._connection.new_workers(self._worker)
        ]

    async def close(self) -> None:
        """Do nothing: the connection belongs to the run."""


class LocalEngine:
    """The decode engine of the run as one of the workers. The broadcaster replaces its weights."""

    name, restarts = "local", False

    def __init__(self, run: RunContext, fingerprints: Mapping[int, str]) -> None:
        """fingerprints: of the versions of this run."""
        self.traffic = Traffic()
        self._run, self._fingerprints = run, fingerprints
        self._layout = layout(run.policy_learner.parameters)

    async def served(self) -> ServedPolicy:
        """Return the policy that the run serves."""
        weights, policy = self._run.weights.value, self._run.policy
        return ServedPolicy(
            version=weights.version,
            step=weights.step,
            fingerprint=weights.fingerprint,
            run_id=self._run.directory.run_id,
            layout=self._layout,
            vocab_size=policy.vocab_size,
            context_length=policy.context_length,
        )

    async def push(self, weights: Weights) -> ServedPolicy:
        """Wait until the run serves the weights."""
        await self._run.weights.wait_until(lambda ready: ready.version >= weights.ready.version)
        return await self.served()

    async def sample(self, request: SampleRequest) -> RolloutAnswer:
        """Return one completion per seed. Raises RequestError if the engine refuses the request."""
        try:
            completions = await self._run.sampler.client.complete(request)
        except GenerationError as error:
            raise RemoteFailure(str(error)) from error
        versions = {version for completion in completions for version in completion.versions}
        known = {version: self._fingerprints[version] for version in versions if version in self._fingerprints}
        return RolloutAnswer(completions=tuple(completions), fingerprints=known)

    async def close(self) -> None:
        """Do nothing: the engine belongs to the run."""
