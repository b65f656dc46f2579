"""The sections of a profile about where rollouts are sampled: by the run, by inference servers, or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from clotho.settings.bounds import NonNegativeFloat, Off, Positive, PositiveFloat, Variant, about
from training_run.attachment import Attach, Attachment, Plan

if TYPE_CHECKING:
    from training_run.profile.schema import Profile
    from training_run.run import RunContext

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
Workers = Annotated[Positive | Literal["all"], about("Number of workers; all: one for each unit of the resource mlx.")]


class RayCluster(Variant, frozen=True, kw_only=True, tag="ray"):
    """Rollouts are sampled by workers on a Ray cluster, which get the weights of the run."""

    address: Annotated[str, about("Cluster: auto is that of this machine, local a new one; or an address.")] = "auto"
    workers: Workers = "all"
    local_share: Annotated[NonNegativeFloat, about("Rows for the run's engine, in rows per row of a worker.")] = 0.0
    sync_interval: Annotated[Positive, about("Publish the weights after every so many updates.")] = 1
    group_seconds: Annotated[PositiveFloat, about("Time in which a worker must finish a group.")] = 600.0
    patience_seconds: Annotated[PositiveFloat, about("Time without a usable worker until the run ends.")] = 300.0


ClusterSection = Annotated[Off | RayCluster, about("Rollout workers on other processes or machines.")]


class Remote(Attachment):
    """`generator = "remote"` of a profile."""

    def slots(self, profile: Profile) -> Mapping[str, str]:
        """The sampler."""
        return {"sampler": 'generator = "remote"'} if isinstance(profile.generator, RemoteGeneration) else {}

    async def prepare(self, plan: Plan) -> Attach | None:
        """Let updates return the values of their tokens, which are compared with those of the servers."""
        settings = plan.profile.generator
        if not isinstance(settings, RemoteGeneration):
            return None
        plan.token_values = True

        async def attach(run: RunContext) -> None:
            from attachments.remote.sampling import add_sampler, inference_servers

            add_sampler(run, settings, servers=inference_servers(run, settings))

        return attach


ATTACHMENT = Remote()
