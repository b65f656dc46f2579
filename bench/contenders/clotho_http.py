"""Clotho's HTTP API under load."""

from __future__ import annotations

from bench.contenders.http_server_load import module_command, serve_http_load
from bench.contenders.semantics import SEMANTICS

if __name__ == "__main__":
    serve_http_load(
        module_command("bench.contenders.clotho_server", []),
        semantics=SEMANTICS["clotho_http"],
        packages=["mlx", "mlx-lm", "hypercorn"],
    )
