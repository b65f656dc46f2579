"""The sampler of a run whose rollouts are sampled on remote inference servers."""

from __future__ import annotations

from clotho.config.schema import RemoteGeneration
from clotho.models.parameters import layout
from clotho.remote.sampler import RemoteSampler, Weights
from clotho.remote.server import RemoteServer
from clotho.run.context import RunContext
from protocols.queues import Inbox
from protocols.step import PolicyUpdated


def remote_sampler(context: RunContext, settings: RemoteGeneration, updates: Inbox[PolicyUpdated]) -> RemoteSampler:
    """Return the sampler. Raises ProfileError if an address is not valid."""
    run_id = context.directory.run_id
    parameters = context.policy_learner.parameters
    return RemoteSampler(
        [
            RemoteServer(url, api_key=settings.api_key, run_id=run_id, timeout_seconds=settings.group_seconds)
            for url in dict.fromkeys(settings.server_url)
        ],
        updates=updates,
        weights=context.weights,
        start=Weights(ready=context.weights.value, parameters=parameters),
        layout=layout(parameters),
        run_id=run_id,
        sync_interval=settings.sync_interval,
        probe_prompt=context.prompts.prompt(0).tokens,
        recompute=context.recompute_logprobs,
        sampling=context.profile.sampling,
        patience_seconds=settings.patience_seconds,
    )
