"""The command `import-profile`: a file of another trainer as a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.text import Text

from attachments.migration.earlier_profiles import import_profile
from clotho.storage.atomic_files import replace_file
from protocols.errors import visible
from training_run.commands.command_line import CommandParser, new_file
from training_run.profile.load import flatten, located, read_text
from training_run.profile.program import program
from training_run.records.terminal_text import print_line


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser("import-profile", "Convert a file of an earlier system or of mlx_lm.lora to a profile.")
    found.add_argument("old", metavar="OLD", help="file *.toml of the earlier system, or *.yaml of mlx_lm.lora")
    found.add_argument("new", metavar="NEW.toml", nargs="?", default="", help="profile to write; default: print it")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Convert a file; return the exit status. Settings that are not carried over are comments. Raises ProfileError."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    label, old = visible(arguments.old, 200), Path(arguments.old).expanduser()
    found = import_profile(read_text(old, label), label)
    settings = located(flatten(found.settings, label), old.parent, label)
    comments = "".join(f"# not carried over: {sentence}\n" for sentence in found.left)
    text = f"# Imported from {label}.\n{comments}\n{tomli_w.dumps({'extends': found.extends, **_nested(settings)})}"
    if not arguments.new:
        console.print(Text(text), soft_wrap=True, end="")
        return 0
    target = new_file(arguments.new)
    replace_file(target, [text.encode()])
    for sentence in found.left:
        print_line(console, f"not carried over: {sentence}")
    print_line(console, f"wrote {target}; check it with: {program()} --profile {target} --dry-run")
    return 0


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by key path as tables, after those without a table."""
    profile: dict[str, Any] = {}
    for path, value in sorted(settings.items(), key=lambda setting: "." in setting[0]):
        *tables, name = path.split(".")
        table = profile
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    return profile
