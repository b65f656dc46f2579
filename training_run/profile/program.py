"""The program as its user meets it: the command that started it, commands of attachments, and remarks."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clotho.extension import Door, TableDoor
from protocols.errors import visible

if TYPE_CHECKING:
    from training_run.profile.schema import Profile

REMARK_LIMIT = 1000
"""Maximum number of characters of a remark."""


ATTACHED_COMMANDS: TableDoor[str] = TableDoor("attachment.COMMANDS")
"""Commands of attachments: word after the program's name -> module, whose `run(argv, console)` returns the status."""

LAUNCH: Door[[Sequence[str]], int | None] = Door("attachment.launch")
"""Takes over a process that `mlx.launch` has started for a run, and returns its exit status.

None: it is the process of the run. Called with the arguments of the run, before MLX is imported.
"""

SUPERVISE: Door[[Profile], None] = Door("attachment.supervise")
"""Replaces the process of a run by a supervisor of it, if the profile says so; before its directory is opened."""


def program() -> str:
    """Return the words before the arguments: `python PATH/pipeline.py` if the user started that file, else `clotho`.

    The path is the one that the user typed, so that a printed command works in the working directory.
    """
    script = sys.argv[0] if sys.argv else ""
    return f"python {shlex.quote(script)}" if os.path.basename(script) == "pipeline.py" else "clotho"


def announce_words(words: Sequence[str]) -> None:
    """Print the words that replaced others."""
    if words:
        announce(f"in the words of Clotho: {shlex.join(words)}")


def announce(*remarks: str) -> None:
    """Print each remark on one line of standard error. The text can quote input."""
    for remark in remarks:
        sys.stderr.write(visible(f"clotho: {remark}", REMARK_LIMIT) + "\n")
