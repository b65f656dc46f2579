"""The command that started the program, for commands that are printed for the user to type."""

from __future__ import annotations

import os
import shlex
import sys


def program() -> str:
    """Return the words before the arguments: `python PATH/pipeline.py` if the user started that file, else `clotho`.

    The path is the one that the user typed, so that a printed command works in the working directory.
    """
    script = sys.argv[0] if sys.argv else ""
    return f"python {shlex.quote(script)}" if os.path.basename(script) == "pipeline.py" else "clotho"
