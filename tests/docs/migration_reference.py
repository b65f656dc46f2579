"""Generates the tables of docs/migrating.md and of mlx-lm in docs/coming-from.md, from the table of other trainers.

python -m tests.docs.migration_reference
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from attachments.migration.other_trainers import EARLIER, SYSTEMS, Program, Row, table
from attachments.migration.tests.earlier_command_lines import LINES, Documented
from attachments.migration.translation import Given
from tests.docs.pages import DOCS, replace_between

PAGE, COMING = DOCS / "migrating.md", DOCS / "coming-from.md"


def tables(systems: Sequence[str] = EARLIER) -> str:
    """One table per system: its programs, flags and keys."""
    parts = []
    for system in systems:
        lines = [f"### {SYSTEMS[system]}", "", "| there | here | note |", "|---|---|---|"]
        lines += [_program(one) for one in table().program if one.system == system]
        lines += [_line(row, name, system) for row in table().row for name in row.names(system)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def command_lines(system: str = "") -> str:
    """One row per command line of the documents of a system; empty: of the earlier systems."""
    rows = [f"| `{_cell(' '.join(line.words))}` | {_outcome(line)} |" for line in LINES if line.system == system]
    return "\n".join(["| command line | here |", "|---|---|", *dict.fromkeys(rows)])


def _outcome(line: Documented) -> str:
    return f"refused: {', '.join(f'`{flag}`' for flag in line.refused)}" if line.refused else "runs"


def _program(one: Program) -> str:
    here = "the same program" if one.new is None else f"`{shlex.join(filter(None, ['clotho', *shlex.split(one.new)]))}`"
    return f"| `{one.name}` | {here} | {_cell(one.note)} |"


def _line(row: Row, name: str, system: str) -> str:
    """The row of a name, with the example value."""
    one = Given(flag=f"--{name}", values=tuple(shlex.split(row.example or "")))
    if "." in name:
        there = f"{name} = {one.text}" if row.value else name
        here = ", ".join(f"`{key}`" for key in row.keys) or "nothing"
    else:
        flag = f"--{name}" if system == "mlx_grpo" else f"--{name.replace('_', '-')}"
        there = shlex.join([*filter(None, [row.command]), flag, *one.values])
        here = f"`{shlex.join(words)}`" if (words := row.words(one.text, {name: one.text})) else "nothing"
        here = f"`{row.before.replace('{}', one.text)} clotho ...`" if row.before else here
    which = "" if "." in name else "accepted" if name in row.accepted else "refused"
    which += f" in {row.program}" if row.program else ""
    return f"| `{_cell(there)}` | {_cell(here)} | {_cell('; '.join(filter(None, [which, row.note])))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    replace_between(PAGE, "systems", tables())
    replace_between(PAGE, "lines", command_lines())
    replace_between(COMING, "lines", command_lines("mlx_lm"))
    replace_between(COMING, "keys", tables(["mlx_lm"]))
