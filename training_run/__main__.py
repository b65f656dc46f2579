"""The installed command `clotho`, which is also `python -m training_run`.

It is `pipeline.py` without the imports of a run, which take a second: they follow when profile and run directory are
known to be valid.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from training_run import main as program


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program, and return the exit status. argv: as of `training_run.main.main`.

    A foreign module that hides one of ours ends it before the program takes over the standard streams.
    """
    try:
        import_module("clotho")
    except ImportError as error:
        sys.stderr.write(f"clotho: {error}\n")
        return 1
    return program.main(argv, load_train=lambda: import_module("pipeline").train)


if __name__ == "__main__":
    sys.exit(main())
