"""Startup of a program that trains with TRL."""

from __future__ import annotations

from bench.contenders.commands import serve_commands
from bench.contenders.semantics import SEMANTICS

COMMANDS = {"imported": ["-c", "from trl import GRPOConfig, GRPOTrainer"]}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS["trl_startup"], packages=["torch", "transformers", "trl"])
