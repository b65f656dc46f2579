"""The settings of a Ray cluster in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from clotho.settings.bounds import NonNegativeFloat, Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting

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

CLUSTER = Setting[Off | RayCluster](
    path="cluster", kind=ClusterSection, default=Off(), attachment="cluster", after="generator"
)

SETTINGS = (CLUSTER,)
