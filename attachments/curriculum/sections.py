"""The settings of the curriculum in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import Positive, PositiveFloat, PositiveFraction, Variant, about
from clotho.settings.mounted import Setting


class UniformCurriculum(Variant, frozen=True, kw_only=True, tag="uniform"):
    """Every problem occurs equally often, up to data.type_weights."""


class SuccessRateCurriculum(Variant, frozen=True, kw_only=True, tag="success_rate"):
    """Prefers problems whose groups probably have both successes and failures; of these, those with more failures."""

    sharpness: Annotated[PositiveFloat, about("Power of the probability of a gradient in the draw of a problem.")] = 1.0
    explore: Annotated[PositiveFraction, about("Share of groups whose problem is drawn uniformly.")] = 0.05
    candidates: Annotated[Positive, about("Number of problems among which the problem of a group is chosen.")] = 64


CurriculumSection = Annotated[
    UniformCurriculum | SuccessRateCurriculum, about("Which problems get rollouts: all equally, or by success rate.")
]

CURRICULUM = Setting[UniformCurriculum | SuccessRateCurriculum](
    path="data.curriculum",
    kind=CurriculumSection,
    default=UniformCurriculum(),
    attachment="curriculum",
    unused_by=("eval",),
)

SETTINGS = (CURRICULUM,)
