"""The settings of inference servers in a profile, and their names in a run directory and in its metrics."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from clotho.settings.bounds import Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting

DIRECTORY = "remote"
"""Directory of a run for adapters and output of inference servers that it starts."""

REMOTE_METRICS = {
    "state": "State: `ready` (gets groups), `updating` (gets weights), or `failed` (at the last attempt to use it).",
    "version": "Policy version that it serves; null while it gets no groups.",
    "lag": "Versions that it is behind the run; null while it gets no groups.",
    "rows": "Completions in flight.",
    "groups": "Number of groups requested from it.",
    "tokens_per_second": "Tokens of the groups that it has completed since the line before, per second.",
    "failures": "Number of failed attempts and groups.",
    "restarts": "Number of restarts of its process.",
    "bytes_sent": "Bytes of weights and requests for it.",
    "bytes_received": "Bytes of its answers.",
    "push_seconds": "Time until it served the last weights that it got.",
}
"""Every key of an entry of `remote_servers`."""

ServerUrl = Annotated[str, Meta(pattern=r"^https?://[^\s/]+\S*$", title="http://HOST:PORT")]


class LocalGeneration(Variant, frozen=True, kw_only=True, tag="local"):
    """Rollouts are sampled by the decode engine of the run."""


class PushedWeights(Variant, frozen=True, kw_only=True, tag="push"):
    """The run sends its weights to the servers over HTTP."""


class SharedWeights(Variant, frozen=True, kw_only=True, tag="path"):
    """The run writes its weights to a directory, from which the servers read them."""

    directory: Annotated[str, about("Directory that the servers know as server.weights_root.", min_length=1)]


class RestartedServers(Variant, frozen=True, kw_only=True, tag="restart"):
    """The run starts mlx_lm.server at each address, and restarts it with each new adapter."""

    start_seconds: Annotated[PositiveFloat, about("Time in which a started server must answer.")] = 120.0


Delivery = Annotated[PushedWeights | SharedWeights | RestartedServers, about("How servers get the weights.")]


class RemoteGeneration(Variant, frozen=True, kw_only=True, tag="remote"):
    """Rollouts are sampled by inference servers, which get the weights of the run."""

    server_url: Annotated[tuple[ServerUrl, ...], about("Addresses of inference servers.", min_length=1)]
    weights: Delivery = PushedWeights()
    api_key: Annotated[str, about("API key of the inference servers.")] = ""
    sync_interval: Annotated[Positive, about("Send the weights after every so many updates.")] = 1
    group_seconds: Annotated[PositiveFloat, about("Time in which a server must finish a group.")] = 600.0
    patience_seconds: Annotated[PositiveFloat, about("Time without a usable server until the run ends.")] = 300.0


GeneratorSection = Annotated[LocalGeneration | RemoteGeneration, about("Where rollouts are sampled.")]

GENERATOR = Setting[LocalGeneration | RemoteGeneration](
    path="generator", kind=GeneratorSection, default=LocalGeneration(), attachment="remote", after="engine"
)

ACCEPT_WEIGHTS = Setting[bool](
    path="server.accept_weights",
    kind=Annotated[bool, about("Serve the weights that the training run of another process sends.")],
    default=False,
    attachment="remote",
    after="shutdown_seconds",
)
WEIGHTS_ROOT = Setting[str](
    path="server.weights_root",
    kind=Annotated[str, about("Directory of weights that a training run shares by path; empty: none.")],
    default="",
    attachment="remote",
    after="accept_weights",
)

SETTINGS = (GENERATOR, ACCEPT_WEIGHTS, WEIGHTS_ROOT)
