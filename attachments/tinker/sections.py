"""The settings of Tinker's API in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import NonNegative, Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting


class TinkerApi(Variant, frozen=True, kw_only=True, tag="on"):
    """Clients of the Tinker SDK train and sample adapters of the base model."""

    directory: Annotated[str, about("Directory of what clients save.", min_length=1)] = "tinker"
    aliases: Annotated[tuple[str, ...], about("Further names of the base model, such as that of its hub.")] = ()
    heartbeat_seconds: Annotated[PositiveFloat, about("Time without a heartbeat after which a session ends.")] = 120.0
    max_bytes: Annotated[
        NonNegative,
        about("Memory of the adapters in training and of one pass, in bytes; 0: half of what the base model leaves."),
    ] = 0
    max_pending: Annotated[Positive, about("Requests of a session that are not finished; more are refused.")] = 1024
    max_sampling_sessions: Annotated[
        Positive, about("Sampling sessions of a session; the one that was not sampled from for longest ends.")
    ] = 128
    max_samplers: Annotated[Positive, about("Adapters in memory that are sampled from; others wait on disk.")] = 16
    micro_batch_tokens: Annotated[Positive, about("Padded tokens per forward and backward pass of a request.")] = 1024


TINKER = Setting[Off | TinkerApi](
    path="server.tinker",
    kind=Annotated[Off | TinkerApi, about("Tinker's API, for the command serve.")],
    default=Off(),
    attachment="tinker",
    paths={"server.tinker.directory": "caller"},
)

SETTINGS = (TINKER,)
