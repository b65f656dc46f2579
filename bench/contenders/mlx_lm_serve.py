"""mlx-lm's HTTP server under load."""

from __future__ import annotations

import sys

from bench.contenders.http_server_load import Started, serve_http_load
from bench.contenders.semantics import SEMANTICS

OPTIONS = ["--decode-concurrency", "64", "--prompt-concurrency", "64", "--log-level", "ERROR"]


def command(server: Started) -> list[str]:
    """Return the command line of the server."""
    settings = ["--model", str(server.model), "--port", str(server.port)]
    adapter = ["--adapter-path", str(server.adapter)] if server.adapter is not None else []
    return [sys.executable, "-m", "bench.contenders.mlx_lm_server", *settings, *OPTIONS, *adapter]


if __name__ == "__main__":
    serve_http_load(command, semantics=SEMANTICS["mlx_lm_serve"], packages=["mlx", "mlx-lm"])
