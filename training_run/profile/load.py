"""Profiles: layers (extended files, the profile, flags) are read, merged and decoded; resolved profiles are written."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tomli_w
from msgspec import Struct

from clotho.data.records import is_hub_dataset
from clotho.extension import TableDoor, needs
from clotho.settings.keys import TYPE, Keys, array_items, decode_table, flatten_table, implied_types, is_default, shown
from clotho.settings.model import FullMethod
from clotho.settings.mounted import PathKind
from clotho.storage.atomic_files import replace_file
from protocols.errors import ProfileError, did_you_mean, visible
from training_run.profile.aliases import PROFILE_NAMES
from training_run.profile.generators import prefix_of, rewards_of
from training_run.profile.keys import CHOICES, PROFILE_KEYS, SECTIONS, SETTABLE
from training_run.profile.mounted import SETTINGS, with_attachments
from training_run.profile.other_words import IMPORTED, YAML
from training_run.profile.program import announce
from training_run.profile.rules import first_complaint
from training_run.profile.schema import Profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
"""Directory of the shipped profiles."""

MASK = "********"
"""The text that hides an API key."""

MAX_BYTES, MAX_FILES, MAX_NAME, MAX_PATH = 2**20, 16, 255, 4000
"""Limits: bytes of a profile, files that extend each other, and bytes of a file name and of a path."""

PATHS: dict[str, PathKind] = {
    "model.path": "model",
    "model.chat_template": "input",
    "policy.adapter": "input",
    "data.train": "input",
    "data.heldout": "input",
    "rewards.name": "code",
    "run_dir": "caller",
    "checkpoint.adapter_path": "caller",
    **{key: kind for setting in SETTINGS for key, kind in setting.paths.items()},
}
"""Keys whose values are paths, each with what they are relative to."""

REWARD_PATHS: TableDoor[Mapping[str, PathKind]] = TableDoor("attachment.REWARD_PATHS")
"""The keys of `rewards.settings` that are paths, by the name of the function."""

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


def load_profile(
    name_or_path: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    adjust: Callable[[list[Layer]], list[Layer]] = list,
) -> Profile:
    """Load a profile, with `overrides` (by key path) as its highest layer. Raises ProfileError.

    adjust: changes the layers, lowest first, before they are combined.
    If the settings of a higher layer leave a setting of a lower layer without effect, the lower setting returns to its
    default: `--async false` works on top of any profile. `{profile}` in run_dir becomes the name, or the file's stem.
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
    name = name_or_path if name_or_path in PROFILE_NAMES else path.stem
    return msgspec.structs.replace(profile, run_dir=profile.run_dir.replace("{profile}", name))


def profile_path(name: str, extending: Path | None = None) -> Path:
    """The file of a profile: a path if the name ends as that of a file or contains a separator, else a shipped profile.

    extending: the file whose `extends` contains the name. Paths are relative to it, and files beside it come first.
    """
    directory = extending.parent if extending else Path()
    if name.endswith((".toml", *YAML)) or os.sep in name:
        return directory / os.path.expanduser(name)
    beside, shipped = directory / f"{name}.toml", PROFILES / f"{PROFILE_NAMES.get(name, name)}.toml"
    if extending and extending != beside and os.path.isfile(beside):
        return beside
    if not os.path.isfile(shipped):
        there = sorted([*PROFILE_NAMES, *(found.stem for found in PROFILES.glob("*.toml"))])
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
    values = with_recorded_scale(flatten(table, label))
    layer = Layer(label=label, values=located(values, path.parent, label))
    if not isinstance(base, str):
        raise ProfileError(f"{label}: extends must be a profile's name or path, not {shown(base)}")
    return [*file_layers(profile_path(base, path), (*above, path)), layer] if base else [layer]


def with_recorded_scale(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with the adapter's scale of 10, if version 0.2.0 recorded them without one.

    A run records every key that has a value. In 0.2.0 neither scale nor alpha had one by default.
    """
    recorded = {"policy.method.scaling", "queues.reports"} <= values.keys()
    stated = {"policy.method.scale", "policy.method.alpha"} & values.keys()
    return {"policy.method.scale": 10.0, **values} if recorded and not stated else values


def read_toml(path: Path, label: str) -> dict[str, Any]:
    """Read a TOML file; that of another trainer is converted. Raises ProfileError if it cannot be read or parsed."""
    text = read_text(path, label)
    if (found := IMPORTED.first(text, label)) is not None:
        announce(*(f"{label}: not carried over: {sentence}" for sentence in found.left))
        return {"extends": found.extends, **found.settings}
    if path.suffix in YAML:
        raise ProfileError(f"{label}: YAML {needs('migration')}")
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


def flatten(table: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The settings of a table by key path. Raises ProfileError, with a suggestion, for an unknown key or section."""
    return flatten_table(PROFILE_KEYS, table, label)


def located(values: dict[str, Any], directory: Path, label: str) -> dict[str, Any]:
    """The settings with absolute input paths.

    A path that starts with `./` or `../`, or that exists in `directory`, is relative to `directory`. Other data files
    and scripts are relative to the working directory; other models, and datasets in the form OWNER/NAME, are names of
    repositories; other chat templates can be names of shipped ones. `file.py:name` is a path too, if the file is there;
    other names are names of Python, or built in. Raises ProfileError for text that cannot be a path.
    """
    found = dict(values)
    for key, kind in PATHS.items():
        array, _, name = key.rpartition(".")
        if key in values:
            found[key] = _located(key, values[key], kind, directory, label)
        elif SECTIONS[array].repeated and values.get(array):
            found[array] = tables = [dict(table) for table in values[array]]
            for number, table in enumerate(tables):
                if name in table:
                    table[name] = _located(f"{array}[{number}].{name}", table[name], kind, directory, label)
    for number, table in enumerate(found.get("rewards") or ()):
        settings = table.get("settings")
        if isinstance(settings, dict) and (kinds := REWARD_PATHS().get(table.get("name"))):
            where = f"rewards[{number}].settings"
            table["settings"] = settings | {
                name: _located(f"{where}.{name}", settings[name], kinds[name], directory, label)
                for name in settings.keys() & kinds
            }
    return found


def _located(key: str, written: Any, kind: PathKind, directory: Path, label: str) -> Any:
    """The absolute path that a setting means; other values as they are."""
    if not isinstance(written, str) or not written:
        return written
    found = os.path.expanduser(written)
    size, longest = len(found), max(len(name.encode("utf-8", "replace")) for name in found.split("/"))
    if found.startswith("~") or "\0" in found or longest > MAX_NAME or size > MAX_PATH:
        raise ProfileError(f"{label}: {key} cannot be a path: {shown(written)}")
    here = os.path.abspath(directory / found)
    if kind == "caller":
        return found
    if key.startswith("data.") and prefix_of(written):
        return written
    if kind == "code":
        file = here.rpartition(":")[0]
        is_there = file.endswith(".py") and os.path.exists(file) and directory != Path.cwd()
        return here if f"{written}/".startswith(("./", "../")) or os.path.isabs(found) or is_there else written
    if f"{written}/".startswith(("./", "../")) or os.path.isabs(found) or os.path.exists(here):
        return here
    if key == "model.chat_template" and (shipped := PROFILES / "templates" / f"{written}.jinja").is_file():
        return str(shipped)
    in_hub = kind == "model" or (key.startswith("data.") and is_hub_dataset(written))
    return written if in_hub and not os.path.exists(found) else os.path.abspath(found)


def merge(layers: Sequence[Layer]) -> Merged:
    """Combine layers key by key; later layers win.

    A layer that replaces another dataset by one that is generated and lists no rewards also sets those of its source.
    """
    complete: list[Layer] = []
    below: object = ""
    for layer in layers:
        train = layer.values.get("data.train", below)
        rewards = [dict(reward) for reward in rewards_of(train)]
        implies = rewards and prefix_of(train) != prefix_of(below)
        complete.append(Layer(layer.label, {"rewards": rewards, **layer.values}) if implies else layer)
        below = train
    return merge_layers(PROFILE_KEYS, complete)


def decode(merged: Merged) -> Profile:
    """Build the profile. Raises ProfileError for a setting that is missing, unavailable or not allowed."""
    profile = decode_tables(merged, Profile)
    learner = profile.learner.with_rate(in_full=isinstance(profile.policy.method, FullMethod))
    return msgspec.structs.replace(profile, learner=learner)


def decode_tables(merged: Merged, kind: type[P]) -> P:
    """Build a struct with some or all tables of a profile. Raises ProfileError as `decode`."""
    return decode_table(PROFILE_KEYS, merged.values, with_attachments(kind), merged.label)


def resolved_toml(profile: Profile, *, mask_secrets: bool = False) -> str:
    """The resolved profile as TOML; loading it gives an equal profile. mask_secrets: hide the API keys."""
    tree = _without_none(msgspec.to_builtins(profile))
    return tomli_w.dumps(_masked(tree) if mask_secrets else tree)


def changed_toml(profile: Profile) -> str:
    """The settings that differ from the defaults as TOML, with hidden API keys; loading it gives an equal profile."""
    tree = _masked(_without_none(msgspec.to_builtins(profile)))
    chosen = PROFILE_KEYS.chosen_types({path: value for path in CHOICES if (value := value_at(tree, path)) is not None})
    changed: dict[str, Any] = {}
    for path, key in SETTABLE.items():
        variant, value = key.variant(chosen), value_at(tree, path)
        if variant is None or value is None or is_default(variant.default, value):
            continue
        if array_items(key.shape):
            value = PROFILE_KEYS.changed_rows(path, value)
        *tables, name = path.split(".")
        reduce(lambda table, part: table.setdefault(part, {}), tables, changed)[name] = value
    return tomli_w.dumps(changed)


def value_at(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key in nested tables; None without one."""
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def write_profile(profile: Profile, path: Path) -> None:
    """Write the resolved profile atomically. Only its owner can read it if it contains an API key.

    Settings of attachments that have their default are left out, so that an installation without them can read it.
    """
    tree = _without_none(msgspec.to_builtins(profile))
    for setting in SETTINGS:
        table = value_at(tree, setting.table) if setting.table else tree
        if isinstance(table, dict) and is_default(setting.default, table.get(setting.name)):
            del table[setting.name]
    replace_file(path, [tomli_w.dumps(tree).encode()], mode=0o600 if _tables_with_secrets(tree) else 0o666)


def _masked(tree: dict[str, Any]) -> dict[str, Any]:
    """Hide the API keys of a tree, in place, and return it."""
    for table in _tables_with_secrets(tree):
        table["api_key"] = MASK
    return tree


def _tables_with_secrets(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [table for table in tree.values() if isinstance(table, dict) and table.get("api_key")]


def _without_none(value: Any) -> Any:
    """Remove None values: TOML has no null, and every None of a profile is a default."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
