"""Clotho's standalone server under load."""

from __future__ import annotations

import sys

from bench.contenders.http_server_load import Started, serve_http_load
from bench.contenders.semantics import SEMANTICS

ADAPTER = "bench"


def command(server: Started) -> list[str]:
    """Return the command line of the server."""
    settings = ["--model", str(server.model), "--server.port", str(server.port)]
    adapter = ["--adapter", f"{ADAPTER}={server.adapter}"] if server.adapter is not None else []
    return [sys.executable, "-m", "training_run", "serve", *settings, *adapter]


if __name__ == "__main__":
    serve_http_load(
        command, semantics=SEMANTICS["clotho_serve"], packages=["mlx", "mlx-lm", "hypercorn"], adapter_name=ADAPTER
    )
