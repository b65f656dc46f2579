"""How the program speaks of itself: the command that started it, and remarks on standard error."""

from __future__ import annotations

import os
import shlex
import sys

from protocols.errors import visible

REMARK_LIMIT = 1000
"""Maximum number of characters of a remark."""


def program() -> str:
    """Return the words before the arguments: `python PATH/pipeline.py` if the user started that file, else `clotho`.

    The path is the one that the user typed, so that a printed command works in the working directory.
    """
    script = sys.argv[0] if sys.argv else ""
    return f"python {shlex.quote(script)}" if os.path.basename(script) == "pipeline.py" else "clotho"


def announce(*remarks: str) -> None:
    """Print each remark on one line of standard error. The text can quote input."""
    for remark in remarks:
        sys.stderr.write(visible(f"clotho: {remark}", REMARK_LIMIT) + "\n")
