"""Runs an environment's script as `PYTHON SCRIPT ...` would, and lets its registration be seen on standard output.

It stands alone: the standard library, in whatever interpreter has atroposlib, which reports the registration only to
loggers that nobody listens to.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys

LOGGER = "atroposlib.envs.base"
SAID = "Initialized env with id "


def repeat(record: logging.LogRecord) -> bool:
    """Print the line about the registration; let every record pass."""
    message = record.getMessage()
    if message.startswith(SAID):
        sys.stdout.write(message + "\n")
        sys.stdout.flush()
    return True


def main() -> None:
    """Become the script."""
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    logging.getLogger(LOGGER).addFilter(repeat)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
