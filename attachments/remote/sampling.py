"""The sampler of a run whose rollouts are sampled on remote inference servers, or by workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attachments.cluster.sampling import LocalEngine, RayWorkers
from attachments.remote.attachment import RayCluster, RemoteGeneration, RestartedServers, SharedWeights
from attachments.remote.messages import ServedPolicy
from attachments.remote.mlx_server import MlxServer
from attachments.remote.place import InferenceServer
from attachments.remote.sampler import RemoteSampler
from attachments.remote.server import RemoteServer
from attachments.remote.weights import Delivery, OverHttp, SharedDirectory, Weights
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import layout
from protocols.checkpoint import AdapterConfig
from protocols.errors import ProfileError
from protocols.step import PolicyUpdated
from training_run.run import RunContext
from training_run.supervision.queues import Queue


def remote_sampler(context: RunContext, updates: dict[str, Queue[PolicyUpdated]]) -> RemoteSampler | None:
    """Return the sampler on inference servers or on workers of a cluster, which receives every update.

    None if the run's own engine samples. Raises ProfileError if a server cannot be used with these settings.
    """
    generator, cluster = context.profile.generator, context.profile.cluster
    if not isinstance(generator, RemoteGeneration) and not isinstance(cluster, RayCluster):
        return None
    updates["remote_sampler"] = queue = Queue[PolicyUpdated]("updates.remote_sampler", capacity=1)
    parameters = context.policy_learner.parameters
    settings = generator if isinstance(generator, RemoteGeneration) else cluster
    assert isinstance(settings, RemoteGeneration | RayCluster)
    sampler = RemoteSampler(
        _servers(context, settings) if isinstance(settings, RemoteGeneration) else [],
        source=RayWorkers(context, settings) if isinstance(settings, RayCluster) else None,
        updates=queue.inbox(),
        weights=context.weights,
        start=Weights(ready=context.weights.value, parameters=parameters),
        layout=layout(parameters),
        vocab_size=context.policy.vocab_size,
        decode=context.policy.tokenizer.decode,
        run_id=context.directory.run_id,
        sync_interval=settings.sync_interval,
        probe_prompt=context.prompts.prompt(0).tokens,
        recompute=context.recompute_logprobs,
        sampling=context.profile.sampling,
        patience_seconds=settings.patience_seconds,
    )
    if isinstance(settings, RayCluster) and settings.local_share:
        sampler.join(LocalEngine(context, layout(parameters), sampler.fingerprints), share=settings.local_share)
    return sampler


def _servers(context: RunContext, settings: RemoteGeneration) -> list[InferenceServer]:
    restarts = isinstance(settings.weights, RestartedServers)
    make = _restarted(context, settings) if restarts else _replacing(context, settings)
    return [make(url) for url in dict.fromkeys(settings.server_url)]


def _replacing(context: RunContext, settings: RemoteGeneration) -> Callable[[str], InferenceServer]:
    """Servers of this project, which replace their weights."""
    run_id = context.directory.run_id
    delivery: Delivery = OverHttp()
    if isinstance(settings.weights, SharedWeights):
        delivery = SharedDirectory(Path(settings.weights.directory).expanduser(), run_id)
    return lambda url: RemoteServer(
        url, api_key=settings.api_key, run_id=run_id, timeout_seconds=settings.group_seconds, delivery=delivery
    )


def _restarted(context: RunContext, settings: RemoteGeneration) -> Callable[[str], InferenceServer]:
    """Servers of mlx-lm, which the run starts."""
    policy, profile, weights = context.policy, context.profile, settings.weights
    assert isinstance(weights, RestartedServers)
    if policy.files is None or not policy.files.is_dir():
        raise ProfileError(
            f"generator.weights: mlx_lm.server loads no {profile.model.path}; it needs a model directory of mlx-lm"
        )
    files = policy.files

    async def loadable(parameters: Any) -> tuple[object, AdapterConfig]:
        return await finish(context.compute.learner.submit(lambda: policy.loadable(parameters)))

    unstarted = ServedPolicy(
        version=-1,
        step=-1,
        fingerprint="",
        run_id=context.directory.run_id,
        layout=layout(context.policy_learner.parameters),
        vocab_size=policy.vocab_size,
        context_length=policy.context_length,
    )
    return lambda url: MlxServer(
        url,
        model=files.absolute(),
        tokenizer=policy.tokenizer,
        loadable=loadable,
        unstarted=unstarted,
        directory=context.directory.remote,
        concurrency=profile.engine.max_num_seqs,
        start_seconds=weights.start_seconds,
        timeout_seconds=settings.group_seconds,
        options=("--trust-remote-code",) if profile.model.trust_remote_code else (),
    )
