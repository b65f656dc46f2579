"""The layers of a profile: the files it extends, itself, and the command line, each on top of the one before."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from clotho.config.keys import keys, names, nearest_key, sections
from clotho.config.nearest import nearest
from protocols.errors import ProfileError

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
"""Where the shipped profiles are."""

COMMAND_LINE = "command line"

INPUT_PATHS = ("model.path", "data.train", "data.heldout")
CALLERS_PATHS = ("run_dir", "checkpoint.adapter_path", "atropos.python")
"""Relative to the working directory, wherever they are written down."""

DISPLACES = {
    "policy.scale": ("policy.alpha",),
    "policy.alpha": ("policy.scale",),
    "data.train": ("data.heldout",),
    "learner.entropy_decay": ("learner.entropy_target",),
    "learner.entropy_target": ("learner.entropy_decay",),
}
"""A layer that sets the first without the second takes back what lower layers said of the second."""


class Layer(Struct, frozen=True, kw_only=True):
    """One source of settings.

    label: as errors name it. values: by key path; None takes a lower layer's value back. recipe: brought along by a
    choice of the layer above it, and given up without a word where it has no effect.
    """

    label: str
    values: dict[str, Any]
    recipe: bool = False


class Merged(Struct, frozen=True, kw_only=True):
    """All layers as one. origin: of each key in `values`, the layer it comes from; higher numbers win.

    rested: of keys that fell back to their defaults, the layer that took their effect away.
    """

    layers: tuple[Layer, ...]
    values: dict[str, Any]
    origin: dict[str, int]
    rested: dict[str, int] = {}

    def label(self, path: str) -> str:
        """Who set a key; the profile itself where nobody did."""
        files = [layer.label for layer in self.layers if layer.label != COMMAND_LINE]
        return self.layers[self.origin[path]].label if path in self.origin else files[-1]

    def rank(self, path: str) -> int:
        """The layer that decided a key, be it by taking away its effect; -1 where none did."""
        return self.origin.get(path, self.rested.get(path, -1))

    def from_recipe(self, path: str) -> bool:
        """Whether a key was brought along by a choice, not written down by anybody."""
        return path in self.origin and self.layers[self.origin[path]].recipe

    def without(self, rested: Mapping[str, int]) -> Merged:
        """The same without some keys, which fall back to their defaults: by path, the layer that made them."""
        kept = {path: value for path, value in self.values.items() if path not in rested}
        origin = {path: self.origin[path] for path in kept}
        return Merged(layers=self.layers, values=kept, origin=origin, rested={**self.rested, **rested})

    def tree(self) -> dict[str, Any]:
        """The nested tables that the structs are made from."""
        root: dict[str, Any] = {}
        for path, value in self.values.items():
            section, _, name = path.rpartition(".")
            (root.setdefault(section, {}) if section else root)[name] = value
        return root


def merge(layers: list[Layer]) -> Merged:
    """Put later layers on top of earlier ones, key by key; lists are replaced as a whole."""
    values: dict[str, Any] = {}
    origin: dict[str, int] = {}
    for number, layer in enumerate(layers):
        displaced = {old for path in layer.values for old in DISPLACES.get(path, ())}
        gone = displaced - layer.values.keys() | {path for path, value in layer.values.items() if value is None}
        for path in gone:
            values.pop(path, None)
            origin.pop(path, None)
        for path, value in layer.values.items():
            if value is not None:
                values[path], origin[path] = value, number
    return Merged(layers=tuple(layers), values=values, origin=origin)


def profile_path(name_or_path: str) -> Path:
    """The file of a shipped profile's name, or of a path (anything that ends in .toml or holds a separator)."""
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
    """The layers of one profile file, the file it extends first. Raises ProfileError."""
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
    """Settings from the command line, by key path; paths in them are relative to the working directory."""
    tree: dict[str, Any] = {}
    for path, value in overrides.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return Layer(label=COMMAND_LINE, values=located(flatten(tree, COMMAND_LINE), Path.cwd()))


def read_toml(path: Path, label: str) -> dict[str, Any]:
    """A TOML file. Raises ProfileError, on one line, where it cannot be read or parsed."""
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


def flatten(table: dict[str, Any], label: str) -> dict[str, Any]:
    """Settings by key path. Raises ProfileError for a key or a section that does not exist, naming the nearest."""
    known = {section.name: section for section in sections()}
    flat: dict[str, Any] = {}
    for name, value in table.items():
        section = known.get(name)
        if section is None:
            _require_known(name, label)
            flat[name] = value
        elif section.repeated:
            for entry in _tables(value, name, label):
                for key in entry:
                    _require_known(f"{name}.{key}", label)
            flat[name] = value
        elif not isinstance(value, dict):
            raise ProfileError(f"{label}: {name} must be a section: [{name}], then one key per line")
        else:
            for key, setting in value.items():
                _require_known(f"{name}.{key}", label)
                flat[f"{name}.{key}"] = setting
    return flat


def located(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same with absolute input paths.

    A path that starts with `./` or `../`, or that exists there, is relative to `directory`; other data files and
    scripts are relative to the working directory, and another model is the name of a repository.
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
    """A path as a message shows it: relative to the working directory where it lies inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _located(written: str, directory: Path, *, repository: bool) -> str:
    relative = os.path.expanduser(written)
    here = os.path.abspath(directory / relative)
    if written.startswith(("./", "../")) or written in (".", "..") or os.path.isabs(relative) or os.path.exists(here):
        return here
    return written if repository and not os.path.exists(relative) else os.path.abspath(relative)


def _extended(base: str, path: Path) -> Path:
    """A sibling of the profile that extends it, or a shipped profile."""
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
