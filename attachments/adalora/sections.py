"""The settings of AdaLoRA in a profile."""

from __future__ import annotations

from typing import Annotated

from clotho.settings.bounds import FractionBelowOne, NonNegativeFloat, Off, Positive, Variant, about
from clotho.settings.mounted import Setting


class AdaLora(Variant, frozen=True, kw_only=True, tag="adalora"):
    """AdaLoRA (arXiv:2303.10512): `policy.method.rank` is the rank at the start."""

    target_rank: Annotated[Positive, about("Mean rank of the modules at the end.")] = 8
    warmup_steps: Annotated[Positive, about("Updates at the start in which all ranks stay.")] = 10
    final_steps: Annotated[Positive, about("Updates at the end in which the chosen ranks stay.")] = 10
    interval: Annotated[Positive, about("Updates between two choices of the ranks.")] = 1
    sensitivity_decay: Annotated[FractionBelowOne, about("Decay of the averages of sensitivities (beta1).")] = 0.85
    uncertainty_decay: Annotated[FractionBelowOne, about("Decay of the averages of uncertainties (beta2).")] = 0.85
    orthogonality: Annotated[NonNegativeFloat, about("Weight of the orthogonality penalty (gamma).")] = 0.1


RANK_BUDGET = Setting[Off | AdaLora](
    path="policy.rank_budget",
    kind=Annotated[Off | AdaLora, about("Ranks that are chosen in training, within a budget.")],
    default=Off(),
    attachment="adalora",
    after="method",
)

SETTINGS = (RANK_BUDGET,)
