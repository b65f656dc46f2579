"""Names of settings in other trainers: the tables `other_trainers.toml` and `earlier_systems.toml`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

SYSTEMS = {
    "trl": "TRL", "verl": "verl", "mlx_lm": "mlx-lm", "mlx_lm_lora": "mlx-lm-lora", "earlier": "earlier trainers",
    "same": "earlier trainers",
}  # fmt: skip
"""The columns of the table, with their names in messages."""


class Counterpart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row: a setting, as each system names it. The fields are described in `other_trainers.toml`."""

    keys: tuple[str, ...] = ()
    note: str = ""
    trl: tuple[str, ...] = ()
    verl: tuple[str, ...] = ()
    mlx_lm: tuple[str, ...] = ()
    mlx_lm_lora: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    same: tuple[str, ...] = ()


class Row(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command, flag, key, variable or route of an earlier system. `earlier_systems.toml` describes the fields."""

    kind: Literal["command", "flag", "key", "variable", "route"]
    old: str
    new: tuple[str, ...] = ()
    page: str = ""
    keys: tuple[str, ...] = ()
    values: dict[str, dict[str, Any]] = {}
    ignored: tuple[str, ...] = ()
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of settings, with underscores and without tables. A single word, such as `enabled`, is no name."""
        if self.kind == "key":
            name = self.old.rpartition(".")[2]
            return (name,) if "_" in name else ()
        words = [word.rstrip(",") for word in self.old.split() if word.startswith("--")]
        return tuple(word[2:].replace("-", "_") for word in words) if self.kind == "flag" else ()

    @property
    def settings(self) -> tuple[str, ...]:
        """The keys that have the effect of the setting."""
        flags = (word[2:].replace("-", "_") for word in self.new if word.startswith("--"))
        found = [SHORT.get(name, name) for name in flags if name != "profile"]
        return (*found, *self.keys, *(key for values in self.values.values() for key in values))


class System(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An earlier system with its rows."""

    name: str
    title: str
    row: tuple[Row, ...]


SHORT = {"model": "model.path", "dataset": "data.train"}
"""Short names of flags, with their keys."""


@cache
def systems() -> tuple[System, ...]:
    """All earlier systems."""
    table = Path(__file__).with_name("earlier_systems.toml").read_bytes()
    return msgspec.toml.decode(table, type=dict[str, tuple[System, ...]])["system"]


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """All rows. The table is read only if a name is unknown."""
    table = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(table, type=dict[str, tuple[Counterpart, ...]])["setting"]


@cache
def by_name() -> dict[str, Counterpart]:
    """The row of every name, with underscores. Names of earlier systems that no row has come from their tables."""
    rows = {name: row for row in counterparts() for system in SYSTEMS for name in getattr(row, system)}
    found: dict[str, list[Row]] = {}
    for row in (row for system in systems() for row in system.row):
        for name in row.names:
            found.setdefault(name, []).append(row)
    return {name: _of_earlier(name, documented) for name, documented in found.items()} | rows


def _of_earlier(name: str, rows: list[Row]) -> Counterpart:
    """Return the row of a name that only earlier systems have."""
    keys = tuple(dict.fromkeys(key for row in rows for key in row.settings))
    note = next((row.note for row in rows if row.note), "")
    page = next((row.page for row in rows if row.page not in ("", "none")), "")
    return Counterpart(keys=keys, note=note or (f"see {page}" if page and not keys else ""), earlier=(name,))


@cache
def accepted() -> dict[str, tuple[str, ...]]:
    """The keys that an accepted name sets, by name."""
    return {name: row.keys for row in counterparts() for name in row.same}


def advice(name: str, spelled: Callable[[str], str] = str) -> str | None:
    """The end of a message that names the alternative; None if no trainer uses the name. spelled: writes a key."""
    name = name.replace("-", "_")
    if (row := by_name().get(name)) is None:
        return None
    used_by = f"{name} in {', '.join(label for system, label in SYSTEMS.items() if name in getattr(row, system))}"
    use = f"use {' and '.join(map(spelled, row.keys))}" if row.keys else "there is no such setting"
    return f"{use} ({used_by})" + (f"; {row.note}" if row.note else "")
