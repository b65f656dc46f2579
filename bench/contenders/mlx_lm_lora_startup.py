"""Startup commands of mlx-lm-lora."""

from __future__ import annotations

from bench.contenders.commands import serve_commands
from bench.contenders.semantics import SEMANTICS

COMMANDS = {"help": ["-m", "mlx_lm_lora.train", "--help"], "imported": ["-c", "import mlx_lm_lora.train"]}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS["mlx_lm_lora_startup"], packages=["mlx", "mlx-lm", "mlx-lm-lora"])
