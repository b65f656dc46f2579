"""Generates the table of docs/coming-from.md from `attachments.migration.other_trainers`.

python -m tests.docs.name_reference
"""

from __future__ import annotations

from attachments.migration.other_trainers import Row
from attachments.migration.other_trainers import table as trainers
from tests.docs.pages import DOCS, replace_between

PAGE = DOCS / "coming-from.md"
HEADING = ("Clotho", "TRL", "verl", "mlx-lm", "mlx-lm-lora", "note")


def table() -> str:
    """One row per setting that TRL, verl, mlx-lm or mlx-lm-lora has; settings without a key here come last.

    A row for particular values is left out if a row for all values has the same names.
    """
    rows = [row for row in trainers().row if row.trl or row.verl or row.mlx_lm or row.mlx_lm_lora]
    general = {name for row in rows if not row.value for name in row.systems}
    rows = [row for row in rows if not row.command and not (row.value and row.systems.keys() <= general)]
    rows.sort(key=lambda row: not row.keys)
    rule = "|" + "---|" * len(HEADING)
    return "\n".join([_line(HEADING), rule, *(_line(_cells(row)) for row in rows)])


def _cells(row: Row) -> tuple[str, ...]:
    systems = (row.trl, row.verl, row.mlx_lm, row.mlx_lm_lora)
    return (_names(row.keys) or "none", *map(_names, systems), row.note.replace("|", "\\|"))


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    replace_between(PAGE, "names", table())
