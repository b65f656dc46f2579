"""Profiles: layers (extended files, the profile, flags) are read, merged and decoded; resolved profiles are written."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tomli_w
from msgspec import Struct

from clotho.data.records import is_hub_dataset
from clotho.settings.data import GYM
from clotho.storage.atomic_files import replace_file
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.profile import keys
from training_run.profile.earlier_profiles import EARLIER, import_profile
from training_run.profile.keys import CHOICES, KEYS, REQUIRED, SECTIONS, SETTABLE, TYPE, chosen_types, shown
from training_run.profile.program import announce
from training_run.profile.rules import first_complaint
from training_run.profile.schema import Profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
"""Directory of the shipped profiles."""

COMMAND_LINE, ADAPTER, MASK = "command line", "policy.adapter", "********"
"""The names of the layers of flags and of the settings of an adapter, and the text that hides an API key."""

MAX_BYTES, MAX_FILES, MAX_NAME, MAX_PATH = 2**20, 16, 255, 4000
"""Limits: bytes of a profile, files that extend each other, and bytes of a file name and of a path."""

MODELS = ("model.path", "engine.speculation.path")
INPUT_PATHS = (
    *MODELS, "model.chat_template", "policy.adapter", "data.train", "data.heldout", "server.api_keys_file",
)  # fmt: skip
CALLERS_PATHS = ("run_dir", "checkpoint.adapter_path", "atropos.python")
"""Keys whose paths are always relative to the working directory."""

OWN = {"learner.objective.type": "learner.objective.", "learner.optimizer.type": "learner.optimizer.learning_rate"}
"""Settings that never pass to another type, by choice: an objective is the recipe of one paper."""

DISPLACES = {
    "policy.method.scale": ("policy.method.alpha",),
    "policy.method.alpha": ("policy.method.scale",),
    "data.train": (
        "data.heldout",
        "data.subset",
        "data.train_split",
        "data.heldout_split",
        "data.type_weights",
        "data.reasoning_gym",
    ),
    "model.path": ("model.chat_template", "model.chat_template_kwargs"),
}
"""A layer that sets the first key removes the values of the others, unless it sets them, from lower layers."""

GYM_REWARDS = [{"name": "reasoning_gym", "correct": True}]
"""The rewards of datasets of Reasoning Gym in a profile that lists none."""


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


def load_profile(
    name_or_path: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    adjust: Callable[[list[Layer]], list[Layer]] = list,
) -> Profile:
    """Load a profile, with `overrides` (by key path) as its highest layer. Raises ProfileError.

    adjust: changes the layers, lowest first, before they are combined.
    If the settings of a higher layer leave a setting of a lower layer without effect, the lower setting returns to its
    default: `--async false` works on top of any profile. `{profile}` in run_dir becomes the stem of the file.
    """
    path = profile_path(name_or_path)
    flags = located(flatten(dict(overrides or {}), COMMAND_LINE), Path.cwd(), COMMAND_LINE)
    merged = merge(adjust([*file_layers(path), *([Layer(label=COMMAND_LINE, values=flags)] if overrides else [])]))
    profile = decode(merged)
    while (complaint := first_complaint(profile)) is not None:
        cause = max((merged.origin.get(other, -1) for other in complaint.decided_by), default=-1)
        if merged.origin.get(complaint.key, -1) >= cause:
            raise ProfileError(f"{merged.label(complaint.key)}: {complaint.text}")
        merged.values.pop(complaint.key, None)
        merged.origin[complaint.key] = cause  # the layer whose settings reset the key
        profile = decode(merged)
    return msgspec.structs.replace(profile, run_dir=profile.run_dir.replace("{profile}", path.stem))


def profile_path(name: str, extending: Path | None = None) -> Path:
    """The file of a profile: a path if the name ends in .toml or contains a separator, otherwise a shipped profile.

    extending: the file whose `extends` contains the name. Paths are relative to it, and files beside it come first.
    """
    directory = extending.parent if extending else Path()
    if name.endswith(".toml") or os.sep in name:
        return directory / os.path.expanduser(name)
    beside, shipped = directory / f"{name}.toml", PROFILES / f"{name}.toml"
    if extending and extending != beside and os.path.isfile(beside):
        return beside
    if not os.path.isfile(shipped):
        there = sorted(found.stem for found in PROFILES.glob("*.toml"))
        hint = did_you_mean(name, there)
        raise ProfileError(f"no profile {visible(name, 60)!r}: there are {', '.join(there)}{hint}")
    return shipped


def file_layers(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of a profile file, lowest first. Raises ProfileError."""
    path = Path(os.path.abspath(path))
    label = visible(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path), 200)
    if path in above:
        raise ProfileError(f"{label}: extends itself: " + " -> ".join(file.name for file in (*above, path)))
    if len(above) == MAX_FILES:
        raise ProfileError(f"{label}: more than {MAX_FILES} profiles extend each other")
    table = read_toml(path, label)
    base = table.pop("extends", "")
    layer = Layer(label=label, values=located(flatten(table, label), path.parent, label))
    if not isinstance(base, str):
        raise ProfileError(f"{label}: extends must be a profile's name or path, not {shown(base)}")
    return [*file_layers(profile_path(base, path), (*above, path)), layer] if base else [layer]


def read_toml(path: Path, label: str) -> dict[str, Any]:
    """Read a TOML file; that of an earlier system is converted. Raises ProfileError if it cannot be read or parsed."""
    text = read_text(path, label)
    if EARLIER.search(text):
        found = import_profile(text, label)
        announce(*(f"{label}: not carried over: {sentence}" for sentence in found.left))
        return {"extends": found.extends, **found.settings}
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ProfileError(f"{label}: is not valid TOML: {visible(' '.join(str(error).split()), 200)}") from error


def read_text(path: Path, label: str) -> str:
    """Read a regular text file of limited size. Raises ProfileError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ProfileError(f"{label}: is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ProfileError(f"{label}: is larger than {MAX_BYTES} bytes")
        return text.decode("utf-8-sig")
    except ProfileError:
        raise
    except FileNotFoundError:
        raise ProfileError(f"{label}: there is no such file") from None
    except OSError as error:
        raise ProfileError(f"{label}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{label}: is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:  # a NUL in the path
        raise ProfileError(f"{label}: cannot be read: {error}") from error


def flatten(table: dict[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a table by key path. Raises ProfileError, with a suggestion, for an unknown key or section.

    `optimizer = "muon"` is short for `optimizer = { type = "muon" }`, and `objective = "module:function"` for the type
    `custom` with that function.
    """
    flat: dict[str, Any] = {}
    for name, value in table.items():
        path = prefix + name
        section = SECTIONS.get(path)
        if section is None:
            _require_known(path, label)
            custom = path == "learner.objective.type" and isinstance(value, str) and ":" in value
            flat |= {path: "custom", "learner.objective.function": value} if custom else {path: value}
        elif section.repeated:
            if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
                raise ProfileError(f"{label}: {path} must be a list of tables: [[{path}]], then one key per line")
            for key in (key for entry in value for key in entry):
                _require_known(f"{path}.{key}", label)
            flat[path] = value
        elif isinstance(value, dict) or (section.types and isinstance(value, str)):
            flat |= flatten(value if isinstance(value, dict) else {TYPE: value}, label, f"{path}.")
        else:
            raise ProfileError(f"{label}: {path} must be a section: [{path}], then one key per line")
    return flat


def _require_known(path: str, label: str) -> None:
    if path not in KEYS:
        hint = keys.suggestion(path, {*KEYS, *filter(None, SECTIONS)})
        raise ProfileError(f"{label}: unknown {'key' if '.' in path else 'key or section'} {visible(path, 60)}; {hint}")


def located(values: dict[str, Any], directory: Path, label: str) -> dict[str, Any]:
    """The settings with absolute input paths.

    A path that starts with `./` or `../`, or that exists in `directory`, is relative to `directory`. Other data files
    and scripts are relative to the working directory; other models, and datasets in the form OWNER/NAME, are names of
    repositories; other chat templates can be names of shipped ones. Raises ProfileError for text that cannot be a path.
    """

    def checked(key: str, written: Any) -> Any:
        if not isinstance(written, str) or not written:
            return written
        found = os.path.expanduser(written)
        size, longest = len(found), max(len(name.encode("utf-8", "replace")) for name in found.split("/"))
        if found.startswith("~") or "\0" in found or longest > MAX_NAME or size > MAX_PATH:
            raise ProfileError(f"{label}: {key} cannot be a path: {shown(written)}")
        here = os.path.abspath(directory / found)
        if key in CALLERS_PATHS:
            return found
        if key.startswith("data.") and is_gym_dataset(written):
            return written
        if f"{written}/".startswith(("./", "../")) or os.path.isabs(found) or os.path.exists(here):
            return here
        if key == "model.chat_template" and (shipped := PROFILES / "templates" / f"{written}.jinja").is_file():
            return str(shipped)
        in_hub = key in MODELS or (key.startswith("data.") and is_hub_dataset(written))
        return written if in_hub and not os.path.exists(found) else os.path.abspath(found)

    found = values | {key: checked(key, values[key]) for key in (*INPUT_PATHS, *CALLERS_PATHS) if key in values}
    if environments := found.get("environments"):
        found["environments"] = [
            table | {key: checked(f"environments[{number}].script", table[key]) for key in table if key == "script"}
            for number, table in enumerate(environments)
        ]
    return found


def is_gym_dataset(name: object) -> bool:
    """Whether the value of `data.train` or `data.heldout` names datasets of Reasoning Gym."""
    return isinstance(name, str) and name.startswith(GYM)


def merge(layers: list[Layer]) -> Merged:
    """Combine layers key by key; later layers win. Lists are replaced as a whole.

    A layer that replaces another dataset by one of Reasoning Gym and lists no rewards also sets the gym's reward.
    A layer that sets a key of a union whose type is `none` or `off` chooses the first type that has the key. A layer
    that changes the type of a union keeps the settings that `_stale` does not name.
    """
    merged = Merged(labels=tuple(layer.label for layer in layers), values={}, origin={})
    for number, layer in enumerate(layers):
        given = {**dict(_implied(merged.values, layer.values)), **layer.values}
        if is_gym_dataset(given.get("data.train")) and not is_gym_dataset(merged.values.get("data.train")):
            given = {"rewards": GYM_REWARDS, **given}
        gone = {old for path, others in DISPLACES.items() if path in given for old in others if old not in given}
        gone |= {path for path, value in given.items() if value is None} | set(_stale(merged.values, given))
        for path in gone & merged.values.keys():
            del merged.values[path], merged.origin[path]
        given = {path: value for path, value in given.items() if value is not None}
        merged.values.update(given)
        merged.origin.update(dict.fromkeys(given, number))
    return merged


def _implied(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The types that the settings of a layer imply, by choice."""
    chosen = chosen_types({**values, **given})
    for choice in CHOICES:
        if choice not in given and chosen.get(choice) in ("none", "off"):
            below = [path for path in given if path.startswith(choice.removesuffix(TYPE)) and path in KEYS]
            yield from ((choice, keys.types_of(KEYS[path], choice)[0]) for path in below[:1])


def _stale(values: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """The settings of lower layers that do not pass to the types that a layer chooses.

    A setting passes to another type if both types have the key with the same default, except the settings in `OWN`.
    """
    left, before, after = dict(values), chosen_types(values), chosen_types({**values, **given})
    for path in types_first(values):
        old, new = SETTABLE[path].variant(before), SETTABLE[path].variant(after)
        changed = [choice for choice in (old.types if old else ()) if before[choice] != after.get(choice)]
        own = any(path.startswith(OWN.get(choice, " ")) for choice in changed)
        if old and changed and (own or new is None or new.default != old.default):
            left.pop(path)
            after = chosen_types({**left, **given})
            yield path


def decode(merged: Merged) -> Profile:
    """Build the profile. Raises ProfileError for a setting that is missing, unavailable or not allowed."""
    return decode_tables(merged, Profile)


def decode_tables(merged: Merged, kind: type[P]) -> P:
    """Build a struct with some or all tables of a profile. Raises ProfileError as `decode`."""
    checked, chosen = dict[str, Any](), chosen_types(merged.values)
    for path in types_first(merged.values):
        label, key = merged.label(path), SETTABLE[path]
        checked[path] = keys.converted(key, merged.values[path], f"{label}: {path.removesuffix(f'.{TYPE}')}")
        if (why := keys.why_unavailable(key, chosen)) is not None:
            raise ProfileError(f"{label}: {why}")
    tree, chosen = dict[str, Any](), chosen_types(checked)
    for path, key in sorted(SETTABLE.items(), key=lambda setting: "." not in setting[0]):
        if path.partition(".")[0] in kind.__struct_encode_fields__ and (variant := key.variant(chosen)) is not None:
            value = checked.get(path, variant.default)
            if value is REQUIRED:
                what = f"[[{path}]]" if keys.array_items(key.shape) else path
                raise ProfileError(f"{merged.label(path.rpartition('.')[0])}: {what} is missing: {key.help}")
            *tables, name = path.split(".")
            reduce(lambda table, part: table.setdefault(part, {}), tables, tree)[name] = value
    return msgspec.convert(tree, kind)


def types_first(paths: Iterable[str]) -> list[str]:
    """The types of outer unions, of inner unions, then all other keys."""
    return sorted(paths, key=lambda path: (path not in CHOICES, path.count("."), path))


def resolved_toml(profile: Profile, *, mask_secrets: bool = False) -> str:
    """The resolved profile as TOML; loading it gives an equal profile. mask_secrets: hide the API keys."""
    tree = _without_none(msgspec.to_builtins(profile))
    return tomli_w.dumps(_masked(tree) if mask_secrets else tree)


def changed_toml(profile: Profile) -> str:
    """The settings that differ from the defaults as TOML, with hidden API keys; loading it gives an equal profile."""
    tree = _masked(_without_none(msgspec.to_builtins(profile)))
    chosen = chosen_types({path: value for path in CHOICES if (value := _at(tree, path)) is not None})
    changed: dict[str, Any] = {}
    for path, key in SETTABLE.items():
        variant, value = key.variant(chosen), _at(tree, path)
        if variant is None or value is None or keys.is_default(variant.default, value):
            continue
        if keys.array_items(key.shape):
            value = keys.changed_rows(path, value)
        *tables, name = path.split(".")
        reduce(lambda table, part: table.setdefault(part, {}), tables, changed)[name] = value
    return tomli_w.dumps(changed)


def _at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key in nested tables; None without one."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def write_profile(profile: Profile, path: Path) -> None:
    """Write the resolved profile atomically. Only its owner can read it if it contains an API key."""
    secret = _tables_with_secrets(msgspec.to_builtins(profile))
    replace_file(path, [resolved_toml(profile).encode()], mode=0o600 if secret else 0o666)


def _masked(tree: dict[str, Any]) -> dict[str, Any]:
    """Hide the API keys of a tree, in place, and return it."""
    for table in _tables_with_secrets(tree):
        table["api_key"] = MASK
    return tree


def _tables_with_secrets(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [tree[name] for name in ("server", "generator") if tree[name].get("api_key")]


def _without_none(value: Any) -> Any:
    """Remove None values: TOML has no null, and every None of a profile is a default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
