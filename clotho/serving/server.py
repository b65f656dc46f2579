"""The server actor: Hypercorn in this process, with a readiness handshake and a graceful shutdown."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.abc import TaskStatus
from hypercorn.asyncio import serve
from hypercorn.config import Config

from clotho.config.rules import is_loopback
from clotho.config.schema import HttpServer
from clotho.serving.app import build_app
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.services import ServerContext
from protocols.errors import ServerError

BACKLOG = 1024
OPEN_FILES = 8192


def listen(settings: HttpServer) -> socket.socket:
    """Bind the configured address and listen on it.

    Also raises this process's limit of open files, because every connection is an open file and some systems start with
    a limit of 256. Raises ServerError if the address cannot be bound, or if it is not a loopback address and there is
    no API key.
    """
    host, port = settings.host, settings.port
    if not settings.api_key and not is_loopback(host):
        raise ServerError(
            f"server.host {host!r} is reachable from other machines: set server.api_key, or bind 127.0.0.1"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "stop the other program, or choose another port with --server.port (0: any free port)"
            raise ServerError(f"port {port} on {host} is already in use: {advice}") from error
        raise ServerError(f"cannot listen on {host} port {port}: {error}") from error
    raise_open_files_limit(OPEN_FILES)
    return listener


def raise_open_files_limit(limit: int) -> None:
    """Raise this process's soft limit of open files to `limit`, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


class ApiServer:
    """The HTTP API as an actor: `await task_group.start(server.run)` returns the base URL when the server is ready.

    Cancellation stops the admission of requests, gives running requests `server.shutdown_seconds` to finish, and ends
    the rest with an error response.
    """

    name = "server"

    def __init__(
        self,
        context: ServerContext,
        *,
        listener: socket.socket | None = None,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        """listener: a socket from `listen`, bound before the run starts; None: bind in `run`.

        on_request: called for each admitted request.
        """
        self._context, self._listener = context, listener
        self._on_request = on_request
        self.limit = self._new_limit()

    def _new_limit(self) -> ConcurrencyLimit:
        return ConcurrencyLimit(self._context.settings.max_concurrent, on_admitted=self._on_request)

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; a second call binds the address again. Raises ServerError if it cannot be bound."""
        listener, self._listener = self._listener or listen(self._context.settings), None
        self.limit = limit = self._new_limit()
        address, ready, stop = base_url(listener), anyio.Event(), anyio.Event()

        async def until_stopped() -> None:
            ready.set()
            await stop.wait()

        async def serve_shielded() -> None:
            with anyio.CancelScope(shield=True):
                app = build_app(self._context, limit)
                await serve(app, _config(listener), shutdown_trigger=until_stopped)  # type: ignore[arg-type]
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(serve_shielded)
            try:
                await ready.wait()
                task_status.started(address)
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await limit.drain(self._context.settings.shutdown_seconds)
                stop.set()


def base_url(listener: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(listener: socket.socket) -> Config:
    """Return Hypercorn's settings.

    read_timeout stays unset because it also closes connections whose client waits for its response. `RequestBodies`
    limits the time for request bodies, and keep_alive_timeout limits the time for headers and idle connections.
    """
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    config.h11_max_incomplete_size = 16 * 1024
    config.h2_max_concurrent_streams = 100
    config.keep_alive_timeout = 5.0
    config.graceful_timeout = 3.0
    return config
