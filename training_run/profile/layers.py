"""The layers of a profile: files, an adapter and flags, merged key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from clotho.settings.keys import TYPE, Keys
from clotho.settings.tables import implied_types

COMMAND_LINE, ADAPTER = "command line", "policy.adapter"
"""The names of the layers of flags and of the settings of an adapter."""

OWN = {"learner.objective.type": "learner.objective.", "learner.optimizer.type": "learner.optimizer.learning_rate"}
"""Settings that never pass to another type, by choice: an objective is the recipe of one paper."""

DISPLACES = {
    "policy.method.scale": ("policy.method.alpha",),
    "policy.method.alpha": ("policy.method.scale",),
    "data.train": ("data.heldout", "data.subset", "data.train_split", "data.heldout_split", "data.type_weights"),
    "model.path": ("model.chat_template", "model.chat_template_kwargs"),
}
"""A layer that sets the first key removes the values of the others, unless it sets them, from lower layers."""


class Layer(NamedTuple):
    """One source of settings: its name in error messages, and values by key path; None removes a lower value."""

    label: str
    values: dict[str, Any]


class Merged(Struct, frozen=True, kw_only=True):
    """All layers combined. origin: number of the layer that set, or reset, each key; higher layers win."""

    labels: tuple[str, ...]
    values: dict[str, Any]
    origin: dict[str, int]

    def label(self, path: str) -> str:
        """The label of the layer that set a key; the label of the profile if no layer did."""
        number = self.origin.get(path, self.origin.get(f"{path}.{TYPE}"))
        files = [label for label in self.labels if label not in (COMMAND_LINE, ADAPTER)]
        return files[-1] if number is None else self.labels[number]


def merge_layers(keys: Keys, layers: Sequence[Layer]) -> Merged:
    """Combine layers key by key; later layers win. Lists are replaced as a whole.

    A layer that changes the type of a union keeps the settings that `_stale` does not name.
    """
    merged = Merged(labels=tuple(layer.label for layer in layers), values={}, origin={})
    for number, layer in enumerate(layers):
        given = {**dict(implied_types(keys, merged.values, layer.values)), **layer.values}
        gone = {old for path, others in DISPLACES.items() if path in given for old in others if old not in given}
        gone |= {path for path, one in keys.mounted.items() if one.displaced_by in given and path not in given}
        gone |= {path for path, value in given.items() if value is None} | set(_stale(keys, merged.values, given))
        for path in gone & merged.values.keys():
            del merged.values[path], merged.origin[path]
        given = {path: value for path, value in given.items() if value is not None}
        merged.values.update(given)
        merged.origin.update(dict.fromkeys(given, number))
    return merged


def _stale(keys: Keys, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The settings of lower layers that do not pass to the types that a layer chooses.

    A setting passes to another type if both types have the key with the same default, except the settings in `OWN`.
    """
    left, before, after = dict(values), keys.chosen_types(values), keys.chosen_types({**values, **given})
    for path in keys.types_first(values):
        old, new = keys.settable[path].variant(before), keys.settable[path].variant(after)
        changed = [choice for choice in (old.types if old else ()) if before[choice] != after.get(choice)]
        own = any(path.startswith(OWN.get(choice, " ")) for choice in changed)
        if old and changed and (own or new is None or new.default != old.default):
            left.pop(path)
            after = keys.chosen_types({**left, **given})
            yield path
