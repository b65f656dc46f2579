"""Generates docs/commands.md from the help texts of the program and its commands.

python -m tests.docs.command_reference
"""

from __future__ import annotations

import contextlib
import io
import os
from unittest.mock import patch

from tests.docs.pages import DOCS, replace_between
from training_run.__main__ import main
from training_run.main import commands

PAGE = DOCS / "commands.md"


def reference() -> str:
    """One section per command: its help text in a terminal of 120 columns."""
    return "\n\n".join(_section(word) for word in ("", *commands()))


def _section(word: str) -> str:
    printed = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "120"}), contextlib.redirect_stdout(printed):
        status = main([*([word] if word else []), "--help"])
    if status:
        raise RuntimeError(f"clotho {word} --help ended with status {status}")
    return f"## clotho {word or '--profile NAME'}\n\n```text\n{printed.getvalue().rstrip()}\n```"


if __name__ == "__main__":
    replace_between(PAGE, "commands", reference())
