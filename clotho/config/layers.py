"""The layers of a profile, lowest first: the files that it extends, the profile, and the command line."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clotho.config.keys import TYPE, choices, chosen_types, keys, names, nearest_key, sections, types_of
from clotho.config.nearest import nearest
from protocols.errors import ProfileError

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
"""Directory of the shipped profiles."""

COMMAND_LINE = "command line"

INPUT_PATHS = ("model.path", "data.train", "data.heldout")
CALLERS_PATHS = ("run_dir", "checkpoint.adapter_path", "atropos.python")
"""Keys whose paths are always relative to the working directory."""

EMPTY_TYPES = ("none", "off")
"""Types without settings."""

DISPLACES = {
    "policy.method.scale": ("policy.method.alpha",),
    "policy.method.alpha": ("policy.method.scale",),
    "data.train": ("data.heldout",),
}
"""A layer that sets the first key but not the second removes the value of the second from lower layers."""


class Layer(Struct, frozen=True, kw_only=True):
    """One source of settings.

    label: name of the source in error messages. values: by key path; None removes the value of lower layers.
    """

    label: str
    values: dict[str, Any]


class Merged(Struct, frozen=True, kw_only=True):
    """All layers combined. origin: number of the layer that set each key in `values`; higher layers win.

    reset: number of the layer whose settings left a key without effect, for keys that returned to their defaults.
    """

    layers: tuple[Layer, ...]
    values: dict[str, Any]
    origin: dict[str, int]
    reset: dict[str, int] = {}

    def label(self, path: str) -> str:
        """The label of the layer that set a key; the label of the profile if no layer did."""
        files = [layer.label for layer in self.layers if layer.label != COMMAND_LINE]
        if path not in self.origin:
            path = f"{path}.{TYPE}"
        return self.layers[self.origin[path]].label if path in self.origin else files[-1]

    def rank(self, path: str) -> int:
        """Number of the layer that set or reset a key; -1 if no layer did."""
        return self.origin.get(path, self.reset.get(path, -1))

    def without(self, path: str, layer: int) -> Merged:
        """A copy in which a key has its default because of the settings of `layer`."""
        values = {other: value for other, value in self.values.items() if other != path}
        origin = {other: number for other, number in self.origin.items() if other != path}
        return Merged(layers=self.layers, values=values, origin=origin, reset={**self.reset, path: layer})


def merge(layers: list[Layer]) -> Merged:
    """Combine layers key by key; later layers win. Lists are replaced as a whole.

    A layer that changes the type of a union removes the settings of the old type. A layer that sets a key of a union
    whose type is `none` or `off` chooses the first type that has the key.
    """
    values: dict[str, Any] = {}
    origin: dict[str, int] = {}
    for number, written in enumerate(layers):
        layer = Layer(label=written.label, values={**dict(_implied(values, written)), **written.values})
        gone = {old for path in layer.values for old in DISPLACES.get(path, ())} - layer.values.keys()
        gone |= {path for path, value in layer.values.items() if value is None} | set(_replaced(values, layer))
        for path in gone:
            values.pop(path, None)
            origin.pop(path, None)
        for path, value in layer.values.items():
            if value is not None:
                values[path], origin[path] = value, number
    return Merged(layers=tuple(layers), values=values, origin=origin)


def _implied(values: Mapping[str, Any], layer: Layer) -> Iterator[tuple[str, str]]:
    """The types that the settings of `layer` imply, by choice."""
    chosen = chosen_types({**values, **layer.values})
    for choice in choices():
        if choice not in layer.values and chosen.get(choice) in EMPTY_TYPES:
            below = [path for path in layer.values if path.startswith(choice.removesuffix(TYPE)) and path in keys()]
            yield from ((choice, types_of(keys()[path], choice)[0]) for path in below[:1])


def _replaced(values: Mapping[str, Any], layer: Layer) -> Iterator[str]:
    """The settings of lower layers that belong to a type that `layer` replaces."""
    before = chosen_types(values)
    for choice in choices():
        if choice in layer.values and layer.values[choice] != before.get(choice):
            yield from (path for path in values if path.startswith(choice.removesuffix(TYPE)))


def profile_path(name_or_path: str) -> Path:
    """The file of a profile. A value that ends in .toml or contains a separator is a path, others are shipped names."""
    if name_or_path.endswith(".toml") or os.sep in name_or_path:
        return Path(name_or_path).expanduser()
    path = PROFILES / f"{name_or_path}.toml"
    if not path.is_file():
        there = [found.stem for found in PROFILES.glob("*.toml")]
        guess = nearest(name_or_path, there)
        raise ProfileError(
            f"no profile {name_or_path!r}: there are {names(there)}" + (f"; did you mean {guess}?" if guess else "")
        )
    return path


def file_layers(path: Path, *, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The layers of a profile file, lowest first. Raises ProfileError."""
    path = Path(os.path.abspath(path))
    label = shown_path(path)
    if path in above:
        raise ProfileError(f"{label}: extends itself: " + " -> ".join(file.name for file in (*above, path)))
    table = read_toml(path, label)
    base = table.pop("extends", None)
    layer = Layer(label=label, values=located(flatten(table, label), path.parent))
    if base is None:
        return [layer]
    if not isinstance(base, str) or not base:
        raise ProfileError(f"{label}: extends must be a profile's name or path, not {base!r}")
    return [*file_layers(_extended(base, path), above=(*above, path)), layer]


def override_layer(overrides: Mapping[str, Any]) -> Layer:
    """The layer of the command line; paths in its values are relative to the working directory."""
    tree: dict[str, Any] = {}
    for path, value in overrides.items():
        table, name = tree, f"{path}.{TYPE}" if f"{path}.{TYPE}" in choices() and isinstance(value, str) else path
        while "." in name:
            head, _, name = name.partition(".")
            table = table.setdefault(head, {})
        table[name] = value
    return Layer(label=COMMAND_LINE, values=located(flatten(tree, COMMAND_LINE), Path.cwd()))


def read_toml(path: Path, label: str) -> dict[str, Any]:
    """Read a TOML file. Raises ProfileError if it cannot be read or parsed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ProfileError(f"{label}: there is no such file") from None
    except OSError as error:
        raise ProfileError(f"{label}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{label}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{label}: is not valid TOML: {' '.join(str(error).split())}") from error


def flatten(table: dict[str, Any], label: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a table by key path. Raises ProfileError, with a suggestion, for an unknown key or section.

    `optimizer = "muon"` is short for `optimizer = { type = "muon" }`, and `objective = "module:function"` for the type
    `custom` with that function.
    """
    known = {section.name: section for section in sections()}
    flat: dict[str, Any] = {}
    for name, value in table.items():
        path = prefix + name
        section = known.get(path)
        if section is None:
            _require_known(path, label)
            flat |= typed(prefix.rstrip("."), value) if name == TYPE and isinstance(value, str) else {path: value}
        elif section.repeated:
            for entry in _tables(value, path, label):
                for key in entry:
                    _require_known(f"{path}.{key}", label)
            flat[path] = value
        elif isinstance(value, dict):
            flat |= flatten(value, label, f"{path}.")
        elif section.types and isinstance(value, str):
            flat |= typed(path, value)
        else:
            raise ProfileError(f"{label}: {path} must be a section: [{path}], then one key per line")
    return flat


def typed(union: str, word: str) -> dict[str, str]:
    """The settings for which one word for a union is short, by key path."""
    if union == "learner.objective" and ":" in word:
        return {f"{union}.{TYPE}": "custom", f"{union}.function": word}
    return {f"{union}.{TYPE}": word}


def located(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The settings with absolute input paths.

    A path that starts with `./` or `../`, or that exists in `directory`, is relative to `directory`. Other data files
    and scripts are relative to the working directory; other models are names of repositories.
    """
    found = dict(values)
    for key in INPUT_PATHS:
        if isinstance(written := found.get(key), str) and written:
            found[key] = _located(written, directory, repository=key == "model.path")
    for key in CALLERS_PATHS:
        if isinstance(written := found.get(key), str) and written.startswith("~"):
            found[key] = str(Path(written).expanduser())
    if isinstance(tables := found.get("environments"), list | tuple):
        found["environments"] = [_with_script(table, directory) for table in tables]
    return found


def _with_script(table: dict[str, Any], directory: Path) -> dict[str, Any]:
    script = table.get("script")
    if not isinstance(script, str) or not script:
        return table
    return {**table, "script": _located(script, directory, repository=False)}


def shown_path(path: Path) -> str:
    """A path for a message: relative to the working directory if it lies inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _located(written: str, directory: Path, *, repository: bool) -> str:
    relative = os.path.expanduser(written)
    here = os.path.abspath(directory / relative)
    if written.startswith(("./", "../")) or written in (".", "..") or os.path.isabs(relative) or os.path.exists(here):
        return here
    return written if repository and not os.path.exists(relative) else os.path.abspath(relative)


def _extended(base: str, path: Path) -> Path:
    """The file that `extends` names: a file beside the profile, or a shipped profile."""
    if base.endswith(".toml") or os.sep in base:
        return path.parent / Path(base).expanduser()
    sibling = path.parent / f"{base}.toml"
    return sibling if sibling != path and sibling.is_file() else profile_path(base)


def _tables(value: object, name: str, label: str) -> Iterator[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
        raise ProfileError(f"{label}: {name} must be a list of tables: [[{name}]], then one key per line")
    yield from value


def _require_known(path: str, label: str) -> None:
    if path not in keys():
        what = "key" if "." in path else "key or section"
        raise ProfileError(f"{label}: unknown {what} {path}; {nearest_key(path)}")
