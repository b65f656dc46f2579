"""The settings of collapse detection in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import (
    AboveOne,
    Fraction,
    FractionBelowOne,
    Off,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Variant,
    about,
)
from clotho.settings.mounted import Setting


class CollapseChecks(Variant, frozen=True, kw_only=True):
    """Signs of a collapsing policy or of reward hacking."""

    patience: Annotated[Positive, about("Bad updates in a row until a collapse; one at 5 x update_kl_high.")] = 2
    window: Annotated[Positive, about("Healthy updates whose median is the normal value of a statistic.")] = 5
    update_kl_high: Annotated[PositiveFloat, about("Highest KL divergence of one update, in nats per token.")] = 0.1
    ess_low: Annotated[Fraction, about("Lower limit on the effective sample size, as a fraction of the tokens.")] = 0.3
    kl_high: Annotated[PositiveFloat, about("Highest divergence from the reference, in nats per token.")] = 2.0
    reward_drop: Annotated[PositiveFraction, about("Largest drop of the mean reward, relative to its range.")] = 0.3
    entropy_low: Annotated[FractionBelowOne, about("Lowest entropy, relative to its highest normal value.")] = 0.01
    entropy_high: Annotated[AboveOne, about("Highest entropy, relative to its lowest normal value.")] = 4.0
    length_high: Annotated[AboveOne, about("Highest mean completion length, relative to its normal value.")] = 4.0
    truncated_high: Annotated[PositiveFraction, about("Largest rise of the fraction of truncated completions.")] = 0.3
    empty_format_high: Annotated[PositiveFraction, about("Largest rise of the share with only a format reward.")] = 0.35


class WarnOnCollapse(CollapseChecks, frozen=True, kw_only=True, tag="warn"):
    """A collapse is logged as a warning."""


class StopOnCollapse(CollapseChecks, frozen=True, kw_only=True, tag="stop"):
    """A collapse ends the run."""


class RollBackOnCollapse(CollapseChecks, frozen=True, kw_only=True, tag="rollback"):
    """After a collapse, the run returns to the last healthy policy with a smaller learning rate."""

    rollback_rate: Annotated[PositiveFraction, about("Factor of the learning rate after a rollback.")] = 0.3
    max_rollbacks: Annotated[Positive, about("The run ends at the collapse after these rollbacks.")] = 3


CollapseSection = Annotated[
    Off | WarnOnCollapse | StopOnCollapse | RollBackOnCollapse, about("Response to a collapse or to reward hacking.")
]

COLLAPSE_DETECTION = Setting[Off | WarnOnCollapse | StopOnCollapse | RollBackOnCollapse](
    path="collapse_detection",
    kind=CollapseSection,
    default=WarnOnCollapse(),
    attachment="alarms",
    after="replay",
)

SETTINGS = (COLLAPSE_DETECTION,)
