"""The command line of a maker."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from clotho.process import load_blas


def run_command(program: str, description: str | None, make: Callable[[Path, int], None]) -> None:
    """Read the directory and the seed from the command line, load the BLAS, and make the directory."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and demonstrations")
    arguments = parser.parse_args()
    sys.stderr.write(f"BLAS: {load_blas()}\n")
    make(arguments.out, arguments.seed)
