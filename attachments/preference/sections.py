"""The settings of preferences in a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from clotho.settings.bounds import about
from clotho.settings.mounted import Setting


class PreferenceSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which completions objectives of preferences compare, such as `learner.objective = "dpo"`."""

    pairs: Annotated[
        Literal["dataset", "rewards"],
        about("Pairs: those of the dataset, or the best and the worst sampled completion of each group."),
    ] = "dataset"
    max_tokens: Annotated[int, about("Tokens of a completion of the dataset with its prompt; longer: cut.", ge=2)] = (
        2048
    )


PREFERENCE = Setting[PreferenceSection](
    path="preference", kind=PreferenceSection, default=PreferenceSection(), attachment="preference", after="sft"
)

SETTINGS = (PREFERENCE,)
