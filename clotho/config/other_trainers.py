"""Names of settings in TRL, verl, mlx-lm, mlx-lm-lora and earlier MLX trainers: the table `other_trainers.toml`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

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


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """All rows. The table is read only if a name is unknown."""
    table = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(table, type=dict[str, tuple[Counterpart, ...]])["setting"]


@cache
def by_name() -> dict[str, Counterpart]:
    """The row of every name, with underscores."""
    return {name: row for row in counterparts() for system in SYSTEMS for name in getattr(row, system)}


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
