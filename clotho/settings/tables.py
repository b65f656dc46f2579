"""Settings as tables: they are flattened to key paths, and decoded to a struct."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from clotho.settings.keys import REQUIRED, TYPE, Keys, array_items
from protocols.errors import ProfileError

P = TypeVar("P", bound=Struct)


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


def implied_types(keys: Keys, values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield implied types: a key of a union that is `off` chooses the first type that has it. values: lower ones."""
    chosen = keys.chosen_types({**values, **given})
    for choice in keys.choices:
        if choice not in given and chosen.get(choice) == "off":
            below = [path for path in given if path.startswith(choice.removesuffix(TYPE)) and path in keys.all]
            yield from ((choice, keys.types_of(keys.all[path], choice)[0]) for path in below[:1])


def decode_table(keys: Keys, values: Mapping[str, Any], kind: type[P], label_of: Callable[[str], str]) -> P:
    """Build a struct of tables with these keys. label_of: origin of a setting. Raises ProfileError."""
    checked, chosen = dict[str, Any](), keys.chosen_types(values)
    for path in keys.types_first(values):
        label, key = label_of(path), keys.settable[path]
        checked[path] = keys.converted(key, values[path], f"{label}: {path.removesuffix(f'.{TYPE}')}")
        if (why := keys.why_unavailable(key, chosen)) is not None:
            raise ProfileError(f"{label}: {why}")
    tree, chosen = dict[str, Any](), keys.chosen_types(checked)
    for path, key in sorted(keys.settable.items(), key=lambda setting: "." not in setting[0]):
        if path.partition(".")[0] in kind.__struct_encode_fields__ and (variant := key.variant(chosen)) is not None:
            value = checked.get(path, variant.default)
            if value is REQUIRED:
                what = f"[[{path}]]" if array_items(key.shape) else path
                raise ProfileError(f"{label_of(path.rpartition('.')[0])}: {what} is missing: {key.help}")
            *tables, name = path.split(".")
            reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value
    return msgspec.convert(tree, kind)
