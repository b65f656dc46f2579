"""Our HTTP API under the load of clients."""

from __future__ import annotations

from bench.contenders.http_loads import serve_loads

SEMANTICS = (
    "The gateway in front of the engine as a run has them, with their default settings, all weights without an adapter "
    "and nothing that learns; answers carry the log-probability and the version of every token as far as the engine."
)

if __name__ == "__main__":
    serve_loads("bench.contenders.clotho_server", [], semantics=SEMANTICS, packages=["mlx", "mlx-lm", "hypercorn"])
