"""The settings of datasets of Reasoning Gym in a profile."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from clotho.settings.bounds import NonNegative, PositiveFloat, about
from clotho.settings.mounted import Setting

GYM = "reasoning_gym:"
"""Start of `data.train` and `data.heldout` for datasets of Reasoning Gym; their names follow, separated by commas."""


class GymSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One dataset of Reasoning Gym that data.train or data.heldout names, with another size or difficulty."""

    dataset: Annotated[str, about("Name of the dataset in the library.", min_length=1)]
    name: Annotated[str, about("Name in data.train, and type of the problems; empty: data.reasoning_gym.dataset.")] = ""
    weight: Annotated[PositiveFloat, about("Share of the dataset in an epoch, relative to the others.")] = 1.0
    size: Annotated[int, about("Number of problems with different prompts.", ge=1, le=1_000_000)] = 1000
    level: Annotated[NonNegative | None, about("Level of the dataset's curriculum; none: its defaults.")] = None
    settings: Annotated[dict[str, Any], about("Settings of the dataset, such as { max_terms = 3 }.")] = {}

    @property
    def label(self) -> str:
        """The name in `data.train`."""
        return self.name or self.dataset


def gym_names(path: str) -> list[str]:
    """Return the names in `reasoning_gym:NAME,NAME`."""
    return [name.strip() for name in path.removeprefix(GYM).split(",")]


TABLES = Setting[tuple[GymSection, ...]](
    path="data.reasoning_gym",
    kind=tuple[GymSection, ...],
    default=(),
    attachment="reasoning_gym",
    after="type_weights",
    displaced_by="data.train",
)

SETTINGS = (TABLES,)
