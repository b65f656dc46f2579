"""Runs an environment's script as `PYTHON SCRIPT ...` does, and prints its registration to standard output.

The script is standalone: it uses only the standard library, because it runs in the interpreter that has atroposlib.
atroposlib reports the registration only to a logger without handlers.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys

LOGGER = "atroposlib.envs.base"
REGISTRATION_PREFIX = "Initialized env with id "


def print_registration(record: logging.LogRecord) -> bool:
    """Print the log record of the registration; return True, so that every record is handled as usual."""
    message = record.getMessage()
    if message.startswith(REGISTRATION_PREFIX):
        sys.stdout.write(message + "\n")
        sys.stdout.flush()
    return True


def main() -> None:
    """Run the script with its own arguments."""
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    logging.getLogger(LOGGER).addFilter(print_registration)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
