"""The command `import-profile`: a TOML file of an earlier system as a profile."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from msgspec import Struct
from rich.console import Console
from rich.text import Text

from clotho.commands.command_line import CommandParser, require_new_file
from clotho.config.load import read_text
from clotho.config.other_trainers import Row, systems
from clotho.config.program import program
from clotho.monitoring.display import print_line
from clotho.storage.atomic_files import replace_file
from protocols.errors import ProfileError, visible

BASE, ATROPOS = "local-m3", "atropos"
"""The shipped profiles that imported profiles extend: without and with an Atropos API server."""

NULL_LINE = re.compile(r"^\s*[\w.-]+\s*=\s*null\s*(#.*)?$", re.MULTILINE)
"""A key without a value: earlier systems document `null`, which is not valid TOML."""


class ImportedProfile(Struct, frozen=True, kw_only=True):
    """A converted TOML file. text: the profile. left: what could not be carried over, one sentence each."""

    text: str
    left: tuple[str, ...]


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser("import-profile", "Convert a TOML file of an earlier system to a profile.")
    found.add_argument("old", metavar="OLD.toml", help="file of the earlier system")
    found.add_argument("new", metavar="NEW.toml", nargs="?", default="", help="profile to write; default: print it")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Convert a file; return the exit status. Settings that are not carried over are comments. Raises ProfileError."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    label = visible(arguments.old, 200)
    found = import_profile(read_text(Path(arguments.old).expanduser(), label), label)
    if not arguments.new:
        console.print(Text(found.text), soft_wrap=True, end="")
        return 0
    target = Path(arguments.new).expanduser()
    require_new_file(target)
    replace_file(target, [found.text.encode()])
    for sentence in found.left:
        print_line(console, f"not carried over: {sentence}")
    print_line(console, f"wrote {target}; check it with: {program()} --profile {target} --dry-run")
    return 0


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
