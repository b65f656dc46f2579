"""Generates the tables of docs/migrating.md from `clotho.config.other_trainers`.

python -m tests.docs.migration_reference
"""

from __future__ import annotations

import json
import shlex

from clotho.config.other_trainers import Row, accepted, systems
from tests.docs.pages import DOCS, replace_between

PAGE = DOCS / "migrating.md"


def tables() -> str:
    """One table per earlier system."""
    parts = []
    for system in systems():
        lines = [f"## {system.title}", "", "| there | here | note |", "|---|---|---|"]
        lines += [f"| `{_cell(row.old)}` | {_cell(_here(row))} | {_cell(_note(row))} |" for row in system.row]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _here(row: Row) -> str:
    if row.new:
        return f"`{shlex.join(row.new)}`"
    if row.keys:
        return ", ".join(f"`{key}`" for key in row.keys)
    if row.values:
        pairs = ((old, setting) for old, found in row.values.items() for setting in found.items())
        return ", ".join(f"`{old}`: `{key} = {json.dumps(value)}`" for old, (key, value) in pairs)
    return row.page or "none"


def _note(row: Row) -> str:
    is_accepted = row.kind == "flag" and row.names[:1] and row.names[0] in accepted()
    accepts = f"`{row.old.split()[0].rstrip(',')}` is accepted" if is_accepted else ""
    return "; ".join(filter(None, (accepts, row.note)))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    replace_between(PAGE, "systems", tables())
