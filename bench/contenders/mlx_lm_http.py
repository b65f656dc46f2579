"""mlx-lm's HTTP server under load."""

from __future__ import annotations

from bench.contenders.http_server_load import module_command, serve_http_load
from bench.contenders.semantics import SEMANTICS

OPTIONS = ["--decode-concurrency", "64", "--prompt-concurrency", "64", "--log-level", "ERROR"]

if __name__ == "__main__":
    serve_http_load(
        module_command("bench.contenders.mlx_lm_server", OPTIONS),
        semantics=SEMANTICS["mlx_lm_http"],
        packages=["mlx", "mlx-lm"],
    )
