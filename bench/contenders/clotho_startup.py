"""Startup commands of Clotho."""

from __future__ import annotations

from bench.contenders.commands import serve_commands
from bench.contenders.semantics import SEMANTICS

COMMANDS = {
    "help": ["pipeline.py", "--help"],
    "dry run": ["pipeline.py", "--profile", "local-m3", "--dry-run"],
    "imported": ["-c", "import pipeline"],
}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS["clotho_startup"], packages=["mlx", "mlx-lm"])
