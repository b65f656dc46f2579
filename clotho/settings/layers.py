"""Settings in layers: tables are flattened to key paths, layers are merged, and the result is decoded to a struct."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from clotho.settings.keys import REQUIRED, TYPE, Keys, array_items
from protocols.errors import ProfileError

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

P = TypeVar("P", bound=Struct)


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


def flatten_table(keys: Keys, table: Mapping[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a table by key path. Raises ProfileError, with a suggestion, for an unknown key or section.

    `optimizer = "muon"` is short for `optimizer = { type = "muon" }`, and `objective = "module:function"` for the type
    `custom` with that function.
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        path = keys.other_names.get(prefix + name, prefix + name)
        section = keys.sections.get(path)
        if section is None:
            keys.require_known(path, label)
            custom = path == "learner.objective.type" and isinstance(value, str) and ":" in value
            named = {path: keys.with_own_word(keys.all[path], value)}
            flat |= {path: "custom", "learner.objective.function": value} if custom else named
        elif section.repeated:
            if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
                raise ProfileError(f"{label}: {path} must be a list of tables: [[{path}]], then one key per line")
            for key in (key for entry in value for key in entry):
                keys.require_known(f"{path}.{key}", label)
            flat[path] = value
        elif isinstance(value, dict) or (section.types and isinstance(value, str)):
            inner = value if isinstance(value, dict) else {TYPE: value}
            flat |= flatten_table(keys, inner, label, f"{path}.")
        else:
            raise ProfileError(f"{label}: {path} must be a section: [{path}], then one key per line")
    return flat


def merge_layers(keys: Keys, layers: Sequence[Layer]) -> Merged:
    """Combine layers key by key; later layers win. Lists are replaced as a whole.

    A layer that sets a key of a union whose type is `off` chooses the first type that has the key. A layer
    that changes the type of a union keeps the settings that `_stale` does not name.
    """
    merged = Merged(labels=tuple(layer.label for layer in layers), values={}, origin={})
    for number, layer in enumerate(layers):
        given = {**dict(_implied(keys, merged.values, layer.values)), **layer.values}
        gone = {old for path, others in DISPLACES.items() if path in given for old in others if old not in given}
        gone |= {path for path, one in keys.mounted.items() if one.displaced_by in given and path not in given}
        gone |= {path for path, value in given.items() if value is None} | set(_stale(keys, merged.values, given))
        for path in gone & merged.values.keys():
            del merged.values[path], merged.origin[path]
        given = {path: value for path, value in given.items() if value is not None}
        merged.values.update(given)
        merged.origin.update(dict.fromkeys(given, number))
    return merged


def _implied(keys: Keys, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The types that the settings of a layer imply, by choice."""
    chosen = keys.chosen_types({**values, **given})
    for choice in keys.choices:
        if choice not in given and chosen.get(choice) == "off":
            below = [path for path in given if path.startswith(choice.removesuffix(TYPE)) and path in keys.all]
            yield from ((choice, keys.types_of(keys.all[path], choice)[0]) for path in below[:1])


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


def decode_merged(keys: Keys, merged: Merged, kind: type[P]) -> P:
    """Build a struct with some or all of the tables that have these keys.

    Raises ProfileError for a setting that is missing, unavailable or not allowed.
    """
    checked, chosen = dict[str, Any](), keys.chosen_types(merged.values)
    for path in keys.types_first(merged.values):
        label, key = merged.label(path), keys.settable[path]
        checked[path] = keys.converted(key, merged.values[path], f"{label}: {path.removesuffix(f'.{TYPE}')}")
        if (why := keys.why_unavailable(key, chosen)) is not None:
            raise ProfileError(f"{label}: {why}")
    tree, chosen = dict[str, Any](), keys.chosen_types(checked)
    for path, key in sorted(keys.settable.items(), key=lambda setting: "." not in setting[0]):
        if path.partition(".")[0] in kind.__struct_encode_fields__ and (variant := key.variant(chosen)) is not None:
            value = checked.get(path, variant.default)
            if value is REQUIRED:
                what = f"[[{path}]]" if array_items(key.shape) else path
                raise ProfileError(f"{merged.label(path.rpartition('.')[0])}: {what} is missing: {key.help}")
            *tables, name = path.split(".")
            reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value
    return msgspec.convert(tree, kind)
