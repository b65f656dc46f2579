"""Migration from earlier systems: the table `migration.toml`, and the conversion of their TOML files to profiles."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w
from msgspec import Struct

from clotho.config.load import read_text
from clotho.storage.atomic_files import replace_file
from protocols.errors import ProfileError, visible

BASE, ATROPOS = "local-m3", "atropos"
"""The shipped profiles that imported profiles extend: without and with an Atropos API server."""

NULL_LINE = re.compile(r"^\s*[\w.-]+\s*=\s*null\s*(#.*)?$", re.MULTILINE)
"""A key without a value: earlier systems document `null`, which is not valid TOML."""


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command, flag, key, variable or route of an earlier system. `migration.toml` describes the fields."""

    kind: Literal["command", "flag", "key", "variable", "route"]
    old: str
    new: tuple[str, ...] = ()
    page: str = ""
    keys: tuple[str, ...] = ()
    values: dict[str, dict[str, Any]] = {}
    ignored: tuple[str, ...] = ()
    note: str = ""


class System(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An earlier system with its rows."""

    name: str
    title: str
    row: tuple[Row, ...]


class ImportedProfile(Struct, frozen=True, kw_only=True):
    """A converted TOML file. text: the profile. left: what could not be carried over, one sentence each."""

    text: str
    left: tuple[str, ...]


@cache
def systems() -> tuple[System, ...]:
    """All earlier systems."""
    table = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(table, type=dict[str, tuple[System, ...]])["system"]


def import_command(argv: Sequence[str]) -> str:
    """Run the command `import-profile OLD.toml [NEW.toml]`; return the text to print. Raises ProfileError.

    Without NEW.toml, the profile itself is printed, and the settings that were not carried over are its comments.
    """
    if argv[:1] in (["--help"], ["-h"]):
        return "usage: python pipeline.py import-profile OLD.toml [NEW.toml]\n"
    if not 1 <= len(argv) <= 2 or any(word.startswith("-") for word in argv):
        raise ProfileError(
            "import-profile needs the old file, and optionally a new one: import-profile OLD.toml NEW.toml"
        )
    source = Path(argv[0]).expanduser()
    found = import_profile(read_text(source, visible(argv[0], 200)), visible(argv[0], 200))
    if len(argv) == 1:
        return found.text
    target = Path(argv[1]).expanduser()
    if target.exists() or not target.parent.is_dir():
        why = "exists already" if target.exists() else "is in a directory that does not exist"
        raise ProfileError(f"{visible(argv[1], 200)} {why}: name a new file")
    replace_file(target, [found.text.encode()])
    left = "".join(f"not carried over: {sentence}\n" for sentence in found.left)
    return f"{left}wrote {target}; check it with: python pipeline.py --profile {target} --dry-run\n"


def import_profile(text: str, label: str) -> ImportedProfile:
    """Convert the text of an earlier system's TOML file. Raises ProfileError if the text is not valid TOML."""
    try:
        old = dict(_flat(tomllib.loads(NULL_LINE.sub("", text))))
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{label}: is not valid TOML: {visible(' '.join(str(error).split()), 200)}") from error
    rows = {row.old: row for system in systems() for row in system.row if row.kind == "key"}
    settings: dict[str, Any] = {}
    left: list[str] = []
    for key, value in old.items():
        row = rows.get(key)
        if row is None:
            left.append(f"{visible(key, 80)}: no earlier system documents it")
        elif (found := _carried(row, value)) is not None:
            settings |= found
        elif json.dumps(value, default=str) not in row.ignored:
            left.append(
                f"{key} = {visible(json.dumps(value, default=str), 60)}" + (f": {row.note}" if row.note else "")
            )
    if "learner.kl_penalty.estimator" in settings and "learner.kl_penalty.coef" not in settings:
        left.append(f"rl_training.kl_estimator = {settings.pop('learner.kl_penalty.estimator')}: without a KL penalty")
    profile: dict[str, Any] = {"extends": ATROPOS if "atropos.url" in settings else BASE}
    for key, value in sorted(settings.items(), key=lambda setting: "." in setting[0]):
        *tables, name = key.split(".")
        table = profile
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    comments = "".join(f"# not carried over: {sentence}\n" for sentence in left)
    return ImportedProfile(text=f"# Imported from {label}.\n{comments}\n{tomli_w.dumps(profile)}", left=tuple(left))


def _carried(row: Row, value: Any) -> dict[str, Any] | None:
    """The settings for a value of an old key; None if there are none."""
    written = json.dumps(value, default=str)
    if written in row.ignored:
        return None
    if row.keys:
        return dict.fromkeys(row.keys, value)
    return row.values.get(written)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
