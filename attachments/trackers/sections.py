"""The settings of trackers in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import NonNegative, about
from clotho.settings.mounted import Setting


class TrackerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One experiment tracker, which gets metrics, evaluations, completions and warnings."""

    name: Annotated[Literal["wandb", "trackio", "tensorboard"], about("The library that the run reports to.")]
    mode: Annotated[
        Literal["auto", "online", "offline"],
        about("Offline stores files for a later upload; auto is what WANDB_MODE says, or online; wandb only."),
    ] = "auto"
    completions: Annotated[NonNegative, about("Completions in the table of a step; 0: no table.")] = 8


TRACKERS = Setting[tuple[TrackerSection, ...]](
    path="trackers",
    kind=tuple[TrackerSection, ...],
    default=(),
    attachment="trackers",
    after="tracking",
    unused_by=("doctor",),
)

SETTINGS = (TRACKERS,)
