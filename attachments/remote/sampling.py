"""The sampler of a run whose rollouts are sampled on remote inference servers, and these servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attachments.remote.messages import ServedPolicy
from attachments.remote.mlx_server import MlxServer
from attachments.remote.place import InferenceServer, measured, server_metrics
from attachments.remote.sampler import RemoteSampler, ServerSource
from attachments.remote.sections import DIRECTORY, RemoteGeneration, RestartedServers, SharedWeights
from attachments.remote.server import RemoteServer
from attachments.remote.weights import Delivery, OverHttp, SharedDirectory, Weights
from clotho.lanes.compute_thread import finish
from clotho.models.parameters import layout
from protocols.checkpoint import AdapterConfig
from protocols.errors import ProfileError
from training_run.run import RunContext
from training_run.supervision.supervisor import transient


def add_sampler(
    run: RunContext,
    *,
    sync_interval: int,
    patience_seconds: float,
    servers: Sequence[InferenceServer] = (),
    source: ServerSource | None = None,
) -> RemoteSampler:
    """Have the rollouts of a run sampled on inference servers, which get its weights.

    sync_interval: number of updates between two versions that are sent. patience_seconds: time without a usable server
    until the run ends. source: finds servers that join later.
    """
    parameters = run.policy_learner.parameters
    sampler = RemoteSampler(
        servers,
        source=source,
        updates=run.attached.receive_updates(RemoteSampler.name),
        weights=run.weights,
        start=Weights(ready=run.weights.value, parameters=parameters),
        layout=layout(parameters),
        vocab_size=run.policy.vocab_size,
        decode=run.policy.tokenizer.decode,
        run_id=run.directory.run_id,
        sync_interval=sync_interval,
        probe_prompt=run.prompts.prompt(0).tokens,
        recompute=run.recompute_logprobs,
        sampling=run.profile.sampling,
        patience_seconds=patience_seconds,
    )
    run.attached.sampler = sampler
    run.attached.sampled_elsewhere = lambda: sampler.gauges().tokens_sampled
    run.attached.measures.append(measured(sampler.gauges))
    run.attached.metrics.append(lambda: server_metrics(sampler.gauges()))
    run.attached.receivers.append(transient(sampler))
    return sampler


def inference_servers(run: RunContext, settings: RemoteGeneration) -> list[InferenceServer]:
    """Return the servers of `generator.server_url`. Raises ProfileError if they cannot load the model of the run."""
    restarts = isinstance(settings.weights, RestartedServers)
    make = _restarted(run, settings) if restarts else _replacing(run, settings)
    return [make(url) for url in dict.fromkeys(settings.server_url)]


def _replacing(run: RunContext, settings: RemoteGeneration) -> Callable[[str], InferenceServer]:
    """Servers of this project, which replace their weights."""
    run_id = run.directory.run_id
    delivery: Delivery = OverHttp()
    if isinstance(settings.weights, SharedWeights):
        delivery = SharedDirectory(Path(settings.weights.directory).expanduser(), run_id)
    return lambda url: RemoteServer(
        url, api_key=settings.api_key, run_id=run_id, timeout_seconds=settings.group_seconds, delivery=delivery
    )


def _restarted(run: RunContext, settings: RemoteGeneration) -> Callable[[str], InferenceServer]:
    """Servers of mlx-lm, which the run starts."""
    policy, profile, weights = run.policy, run.profile, settings.weights
    assert isinstance(weights, RestartedServers)
    if policy.files is None or not policy.files.is_dir():
        raise ProfileError(
            f"generator.weights: mlx_lm.server loads no {profile.model.path}; it needs a model directory of mlx-lm"
        )
    files = policy.files

    async def loadable(parameters: Any) -> tuple[object, AdapterConfig]:
        return await finish(run.compute.learner.submit(lambda: policy.loadable(parameters)))

    unstarted = ServedPolicy(
        version=-1,
        step=-1,
        fingerprint="",
        run_id=run.directory.run_id,
        layout=layout(run.policy_learner.parameters),
        vocab_size=policy.vocab_size,
        context_length=policy.context_length,
    )
    return lambda url: MlxServer(
        url,
        model=files.absolute(),
        tokenizer=policy.tokenizer,
        loadable=loadable,
        unstarted=unstarted,
        directory=run.directory.path / DIRECTORY,
        concurrency=profile.engine.max_num_seqs,
        start_seconds=weights.start_seconds,
        timeout_seconds=settings.group_seconds,
        options=("--trust-remote-code",) if profile.model.trust_remote_code else (),
    )
