"""Recipes as layers of a profile: what the choice of an objective or a correction brings along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from clotho.config.layers import Layer
from clotho.config.presets import CORRECTIONS, OBJECTIVES, Recipe

OBJECTIVE = "learner.objective"
CORRECTION = "learner.correction"


class Choice(Struct, frozen=True, kw_only=True):
    """The value of a key, and the number of the layer that it comes from."""

    value: Any
    layer: int


def with_recipes(layers: Sequence[Layer]) -> list[Layer]:
    """Put recipes right below the layer that makes the choice: above lower layers, below what that layer says itself.

    Only choices that hold bring anything: an objective that a higher layer replaces takes its recipe along. The
    correction may itself come from the objective's recipe, which then has the last word on that correction's bounds.
    """
    objective, chosen = _choice(layers, OBJECTIVE), _choice(layers, CORRECTION)
    recipe = OBJECTIVES.get(str(objective.value), {}) if objective else {}
    implied = recipe.get("correction")
    correction, last_word = chosen, False
    if objective and implied is not None and (chosen is None or chosen.layer <= objective.layer):
        written = chosen is not None and chosen.layer == objective.layer
        last_word = not written or (chosen is not None and chosen.value == implied)
        correction = chosen if written else Choice(value=implied, layer=objective.layer)
    bounds = CORRECTIONS.get(str(correction.value), {}) if correction else {}

    expanded: list[Layer] = []
    for number, layer in enumerate(layers):
        above = [recipe] if objective and objective.layer == number else []
        if correction and correction.layer == number:
            above = [bounds, *above] if last_word else [*above, bounds]
        expanded += [_layer(layer.label, settings) for settings in above if settings]
        expanded.append(layer)
    return expanded


def _choice(layers: Sequence[Layer], path: str) -> Choice | None:
    found = [number for number, layer in enumerate(layers) if layer.values.get(path) is not None]
    return Choice(value=layers[found[-1]].values[path], layer=found[-1]) if found else None


def _layer(label: str, settings: Recipe) -> Layer:
    return Layer(label=label, values={f"learner.{name}": value for name, value in settings.items()}, recipe=True)
