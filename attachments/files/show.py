"""The command `show`: describes a checkpoint, a run, an adapter or a model, or how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attachments.files.descriptions import describe
from training_run.commands.command_line import CommandParser
from training_run.directory.jsonl import encode
from training_run.records.terminal_text import duration, memory, percent, terminal_text

VALUE_LIMIT = 400
"""Largest number of characters of a value in the table."""


def parser() -> CommandParser:
    """Return the parser of the command line."""
    found = CommandParser(
        "show",
        "Describe a run, RUN@STEP, a checkpoint, a directory of checkpoints, an adapter, a model or a GGUF file; with "
        "two paths, the values that differ. Only small files, headers of tensors and the ends of histories are read.",
    )
    found.add_argument("path", metavar="PATH", help="what to describe")
    found.add_argument("other", metavar="PATH", nargs="?", default="", help="what to compare it with")
    found.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return found


def run(argv: Sequence[str], console: Console) -> int:
    """Describe what the paths name; return the exit status. Raises the errors of `describe`."""
    arguments = parser().parsed(argv, console)
    if arguments is None:
        return 0
    paths = [arguments.path, *([arguments.other] if arguments.other else [])]
    found = [describe(path) for path in paths]
    changed = differences(*found) if len(found) == 2 else {}
    if arguments.json:
        document = found[0] if len(found) == 1 else {"left": found[0], "right": found[1], "differences": changed}
        text = msgspec.json.format(encode(document, terminal_safe=True), indent=2).decode()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
        console.print(_comparison(paths, changed) if len(found) == 2 else _table(found[0]), soft_wrap=False)
    return 0


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values that differ, by dotted key; None where a description lacks the key."""
    first, second = flat(left), flat(right)
    keys = [*first, *(key for key in second if key not in first)]
    return {key: [first.get(key), second.get(key)] for key in keys if first.get(key) != second.get(key)}


def flat(description: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a description by dotted key."""
    found: dict[str, Any] = {}
    for key, value in description.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _table(description: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in flat(description).items():
        table.add_row(Text(terminal_text(key, 80), style="dim"), Text(_formatted(key, value)))
    return table


def _comparison(paths: Sequence[str], changed: Mapping[str, Sequence[Any]]) -> Table | Text:
    if not changed:
        return Text("no differences")
    table = Table(safe_box=True)
    table.add_column(Text("differs"), no_wrap=True)
    for path in paths:
        table.add_column(Text(terminal_text(path, 200)), overflow="fold")
    for key, values in changed.items():
        table.add_row(Text(terminal_text(key, 80)), *(Text(_formatted(key, value)) for value in values))
    return table


def _formatted(key: str, value: Any) -> str:
    """Format a value for the table, by the last word of its key."""
    kind = key.rpartition(".")[2].rpartition("_")[2]
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return terminal_text(", ".join(_formatted(key, item) for item in value), VALUE_LIMIT) or "-"
    if isinstance(value, int | float):
        formats = {"bytes": memory, "seconds": duration, "accuracy": percent, "share": percent}
        if kind in formats:
            return formats[kind](value)
        return f"{value:.6g}" if isinstance(value, float) else f"{value}"
    return terminal_text(str(value), VALUE_LIMIT) or "-"
