"""The settings of stages in a profile."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from clotho.settings.bounds import Positive, about
from clotho.settings.mounted import Setting

Kind = Literal["sft", "preference", "rl", "distill"]


class StageSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage of the run, which continues from the last checkpoint of the stage before."""

    kind: Annotated[Kind, about("What the stage learns from: demonstrations, pairs, rewards, or a teacher.")]
    steps: Annotated[Positive, about("Number of batches that the stage trains on.")]
    data: Annotated[str, about("Dataset of the stage, as `data.train`; empty: that of the profile.")] = ""
    settings: Annotated[dict[str, Any], about("Settings of the stage alone, in the tables of a profile.")] = {}


STAGES = Setting[tuple[StageSection, ...]](
    path="stages",
    kind=tuple[StageSection, ...],
    default=(),
    attachment="stages",
    unused_by=("doctor",),
    paths={"stages.data": "input"},
)

STAGE = Setting[str](
    path="stage",
    kind=Annotated[Literal["all", "sft", "preference", "rl", "distill"], about("Kind of the stages that are run.")],
    default="all",
    attachment="stages",
    after="steps",
    unused_by=("doctor",),
)

SETTINGS = (STAGES, STAGE)
