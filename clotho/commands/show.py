"""The command `show`: describes a checkpoint, a run, an adapter or a model, or how two of them differ."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clotho.commands.descriptions import describe
from clotho.monitoring.terminal_text import duration, memory, percent, terminal_text
from clotho.storage.jsonl import encode
from protocols.errors import ProfileError, visible

USAGE = "usage: python pipeline.py show PATH [PATH] [--json]"
HELP = f"""{USAGE}
  PATH    a run directory, RUN@STEP, a checkpoint, an adapter (mlx-lm, PEFT), a model directory or a GGUF file;
          with two paths, the values that differ are shown
  --json  print JSON instead of a table
Only small files, headers of tensors and the ends of histories are read. Nothing is written.
"""
VALUE_LIMIT = 400
"""Largest number of characters of a value in the table."""


def show(argv: Sequence[str]) -> int:
    """Run the command; return the exit status. argv: the arguments after the command.

    Raises ProfileError for a wrong command line, and the errors of `describe`.
    """
    console = Console(file=sys.stdout)
    if any(word in ("-h", "--help") for word in argv):
        console.print(HELP, markup=False, highlight=False, soft_wrap=True, end="")
        return 0
    flags = [word for word in argv if word.startswith("-")]
    paths = [word for word in argv if not word.startswith("-")]
    if unknown := [flag for flag in flags if flag != "--json"]:
        raise ProfileError(f"show: unknown flag {visible(unknown[0], 60)}; {USAGE}")
    if not 1 <= len(paths) <= 2:
        raise ProfileError(f"show needs one path, or two to compare, not {len(paths)}; {USAGE}")
    found = [describe(path) for path in paths]
    changed = differences(*found) if len(found) == 2 else {}
    if flags:
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
        formats = {"bytes": memory, "seconds": duration, "accuracy": percent}
        if kind in formats:
            return formats[kind](value)
        return f"{value:.6g}" if isinstance(value, float) else f"{value}"
    return terminal_text(str(value), VALUE_LIMIT) or "-"
