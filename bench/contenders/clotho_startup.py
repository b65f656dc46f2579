"""How our program starts."""

from __future__ import annotations

from bench.contenders.commands import serve_commands

SEMANTICS = (
    "`help`: `python pipeline.py --help`. `dry run`: `--dry-run` of local-m3, which resolves the profile and estimates "
    "memory without loading the model. `imported`: all that a run imports, HTTP server and Atropos client included."
)
COMMANDS = {
    "help": ["pipeline.py", "--help"],
    "dry run": ["pipeline.py", "--profile", "local-m3", "--dry-run"],
    "imported": ["-c", "import pipeline"],
}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
