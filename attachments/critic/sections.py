"""The settings of the critic in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import Fraction, NonNegative, NonNegativeFloat, Off, Positive, PositiveFloat, Variant, about
from clotho.settings.mounted import Setting


class ValueHead(Variant, frozen=True, kw_only=True, tag="value_head"):
    """A value head on an adapter of its own, over the base model of the policy."""

    discount: Annotated[Fraction, about("Discount of later rewards per token (gamma).")] = 1.0
    gae_lambda: Annotated[Fraction, about("Weight of later value errors per token (lambda).")] = 1.0
    learning_rate: Annotated[
        PositiveFloat | None, about("Learning rate of the critic (AdamW); none: 3 times that of the policy.")
    ] = None
    epochs: Annotated[Positive, about("Optimizer steps of the critic per batch.")] = 1
    value_clip: Annotated[
        NonNegativeFloat, about("Largest change of a value that lowers the loss, from its value at the start; 0: any.")
    ] = 0.2
    warmup_steps: Annotated[
        NonNegative, about("Batches in which the critic learns and the policy has the advantages of its objective.")
    ] = 10
    normalize: Annotated[bool, about("Advantages have mean 0 and deviation 1 over the tokens of a batch.")] = True


CRITIC = Setting[Off | ValueHead](
    path="critic",
    kind=Annotated[Off | ValueHead, about("Advantages per token from a critic (PPO).")],
    default=Off(),
    attachment="critic",
    after="learner",
)

SETTINGS = (CRITIC,)
