"""Names of settings and programs in other trainers, and what replaces them: the table `other_trainers.toml`."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from training_run.profile.aliases import SHORT

SYSTEMS = {
    "trl": "TRL", "verl": "verl", "mlx_lm": "mlx-lm", "mlx_lm_lora": "mlx-lm-lora",
    "async_grpo": "train_async_grpo.py", "atropos": "Atropos's grpo.py", "mlx_grpo": "mlx-grpo",
    "mlx_parallm": "mlx_parallm",
}  # fmt: skip
"""The systems of the table, with their names in messages."""

EARLIER = ("async_grpo", "atropos", "mlx_grpo", "mlx_parallm")
"""The systems that Clotho supersedes."""

VALUE = "VALUE"
"""The word of a replacement for a value that does not carry over."""

FIELD = re.compile(r"\{([a-z_0-9*/]*)\}")
"""A value in a replacement: empty, a name, or a product and quotient of names and numbers."""


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names with one meaning, and what replaces them. `other_trainers.toml` describes the fields."""

    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    mlx_lm: tuple[str, ...] = ()
    mlx_lm_lora: tuple[str, ...] = ()
    async_grpo: tuple[str, ...] = ()
    atropos: tuple[str, ...] = ()
    mlx_grpo: tuple[str, ...] = ()
    mlx_parallm: tuple[str, ...] = ()
    command: str = ""
    program: str = ""
    value: str = ""
    new: str = ""
    before: str = ""
    defaults: dict[str, str] = {}
    over: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    example: str | None = None
    note: str = ""

    def names(self, system: str) -> tuple[str, ...]:
        """The names in a system."""
        found: tuple[str, ...] = getattr(self, system)
        return found

    @property
    def systems(self) -> dict[str, str]:
        """The first system of every name, in the order of the table."""
        return {name: system for system in reversed(SYSTEMS) for name in self.names(system)}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the profile that the replacement sets; the path of a union for its type."""
        flags = (word[2:].replace("-", "_") for word in shlex.split(self.new) if word.startswith("--"))
        return tuple(SHORT.get(name, name) for name in flags if name not in ("profile", "resume", "resume_step"))

    def applies(self, text: str, command: str, program: str) -> bool:
        """Whether the row is for a value of a flag, in a command line of this command, of this earlier program."""
        return (
            self.command in ("", command)
            and self.program in ("", program)
            and (not self.value or re.fullmatch(self.value, text) is not None)
        )

    def words(self, text: str, values: Mapping[str, str]) -> tuple[str, ...]:
        """The words that replace a flag. values: the values of all flags of the command line, by name."""
        match = re.fullmatch(self.value, text) if self.value else None
        known = self.defaults | dict(values) | (match.groupdict() if match else {}) | {"": text}
        return tuple(FIELD.sub(lambda found: _computed(found[1], known), word) for word in shlex.split(self.new))


def _computed(expression: str, values: Mapping[str, str]) -> str:
    """The value of a field of a replacement; `VALUE` if it cannot be computed."""
    first, *rest = re.split(r"([*/])", expression)
    if not rest:
        return values.get(first, VALUE)
    try:
        number = float(values[first])
        for sign, word in zip(rest[::2], rest[1::2], strict=True):
            operand = float(values.get(word, word))
            number = number * operand if sign == "*" else number / operand
        return str(max(1, math.ceil(number)))
    except (KeyError, ValueError, ArithmeticError):
        return VALUE


class Program(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program of an earlier system. new: None if Clotho does not replace it."""

    system: str
    name: str
    new: str | None = None
    note: str = ""

    @property
    def command(self) -> str:
        """The command of Clotho; empty for a run."""
        first = (self.new or "").partition(" ")[0]
        return "" if first.startswith("--") else first

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that the program stands for."""
        return tuple(shlex.split(self.new or "")[bool(self.command) :])


class Planned(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that Clotho does not have yet. note: what it has."""

    key: str
    value: str
    note: str


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `other_trainers.toml`."""

    row: tuple[Row, ...]
    program: tuple[Program, ...] = ()
    planned: tuple[Planned, ...] = ()


@cache
def table() -> Table:
    """The table. It is read only if a command line or a profile has a name that Clotho does not have."""
    return msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=Table)


@cache
def by_name() -> dict[str, tuple[Row, ...]]:
    """The rows of every name, with underscores."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in table().row:
        for name in row.systems:
            found[name] = (*found.get(name, ()), row)
    return found


@cache
def accepted() -> dict[str, tuple[Row, ...]]:
    """The rows of every accepted name. A name of which only some values or systems are accepted is included."""
    return {name: own for name, rows in by_name().items() if (own := tuple(r for r in rows if name in r.accepted))}


def planned(key: str, value: str) -> str:
    """The end of the message about a value that is planned; empty for any other value."""
    rows = [row for row in table().planned if (row.key, row.value) == (key, value.lower())]
    return f"; {rows[0].note}" if rows else ""


def advice(name: str, spelled: Callable[[str], str] = str) -> str | None:
    """The end of a message that names the key to use; None if no trainer uses the name. spelled: writes a key."""
    name = name.replace("-", "_")
    if (rows := by_name().get(name)) is None:
        return None
    keys = dict.fromkeys(key for row in rows for key in row.keys)
    use = f"use {' or '.join(map(spelled, keys))}" if len(rows) > 1 else f"use {' and '.join(map(spelled, keys))}"
    note = next((row.note for row in rows if row.note), "")
    return f"{use if keys else 'there is no such setting'} ({name} in {used_by(rows, name)})" + (note and f"; {note}")


def used_by(rows: Sequence[Row], name: str) -> str:
    """The systems that have a name, for a message."""
    return ", ".join(label for system, label in SYSTEMS.items() if any(name in row.names(system) for row in rows))


def as_text(value: Any) -> str:
    """A value as the text of a flag."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
