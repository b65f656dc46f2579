"""How a program that trains with TRL starts."""

from __future__ import annotations

from bench.contenders.commands import serve_commands

SEMANTICS = (
    "`imported`: `from trl import GRPOConfig, GRPOTrainer`, with which a user's own program begins; PyTorch is most of "
    "it. TRL's own script for GRPO imports the same before it can say what it can do, so `help` is left out."
)
COMMANDS = {"imported": ["-c", "from trl import GRPOConfig, GRPOTrainer"]}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS, packages=["torch", "transformers", "trl"])
