"""mlx-lm's HTTP server; the command line is the server's.

    .contenders/bin/python -m bench.contenders.mlx_lm_server --model DIRECTORY --port PORT

By default its listen backlog is five connections, and it resets the connections of further simultaneous clients.
"""

from __future__ import annotations

from socketserver import TCPServer

import bench  # noqa: F401, loads the same BLAS as ours does, before MLX

WAITING_CONNECTIONS = 1024

if __name__ == "__main__":
    from mlx_lm.server import main

    TCPServer.request_queue_size = WAITING_CONNECTIONS
    main()  # type: ignore[no-untyped-call]  # mlx-lm is unannotated
