"""The settings of inference servers in a profile."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from clotho.settings.bounds import Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting

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
