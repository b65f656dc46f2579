"""mlx-lm's HTTP server with an adapter under load."""

from __future__ import annotations

from bench.contenders.http_server_load import Started, module_command, serve_http_load
from bench.contenders.mlx_lm_http import OPTIONS
from bench.contenders.semantics import SEMANTICS


def command(server: Started) -> list[str]:
    """Return the command line of the server."""
    return [*module_command("bench.contenders.mlx_lm_server", OPTIONS)(server), "--adapter-path", str(server.adapter)]


if __name__ == "__main__":
    serve_http_load(command, semantics=SEMANTICS["mlx_lm_serve"], packages=["mlx", "mlx-lm"])
