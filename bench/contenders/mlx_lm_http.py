"""mlx-lm's server under the load of clients."""

from __future__ import annotations

from bench.contenders.http_loads import serve_loads

SEMANTICS = (
    "`python -m mlx_lm server --decode-concurrency 64 --prompt-concurrency 64`, so that all clients fit into one "
    "batch; its list of waiting connections is lengthened, because it resets those of 16 clients that come at once."
)
OPTIONS = ["--decode-concurrency", "64", "--prompt-concurrency", "64", "--log-level", "ERROR"]

if __name__ == "__main__":
    serve_loads("bench.contenders.mlx_lm_server", OPTIONS, semantics=SEMANTICS, packages=["mlx", "mlx-lm"])
