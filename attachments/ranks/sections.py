"""The settings of a data-parallel learner in a profile."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from clotho.settings.bounds import NonNegative, PositiveFloat, about
from clotho.settings.mounted import Setting


class DistributedSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks of a data-parallel learner, which mlx.launch starts. No effect on a run of one process."""

    hang_seconds: Annotated[PositiveFloat, about("Seconds without a heartbeat after which a rank counts as lost.")] = (
        8.0
    )
    collective_seconds: Annotated[PositiveFloat, about("Time in which the ranks must add 8 MB of gradients.")] = 10.0
    share_seconds: Annotated[PositiveFloat, about("Time for the share of a rank after that of rank 0.")] = 120.0
    restarts: Annotated[NonNegative, about("How often ranks are started again after one was lost.")] = 5
    shares: Annotated[
        tuple[PositiveFloat, ...], about("Relative work of each rank, rank 0 first; empty: all ranks get the same.")
    ] = ()


DISTRIBUTED = Setting[DistributedSection](
    path="distributed", kind=DistributedSection, default=DistributedSection(), attachment="ranks", after="cluster"
)

SETTINGS = (DISTRIBUTED,)
