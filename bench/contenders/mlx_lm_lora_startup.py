"""How mlx-lm-lora's program starts."""

from __future__ import annotations

from bench.contenders.commands import serve_commands

SEMANTICS = "`help`: `python -m mlx_lm_lora.train --help`. `imported`: that module, which has its GRPO trainer."
COMMANDS = {"help": ["-m", "mlx_lm_lora.train", "--help"], "imported": ["-c", "import mlx_lm_lora.train"]}

if __name__ == "__main__":
    serve_commands(COMMANDS, semantics=SEMANTICS, packages=["mlx", "mlx-lm", "mlx-lm-lora"])
