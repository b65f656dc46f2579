"""The server: Hypercorn inside this process, started with a handshake and stopped with patience."""

from __future__ import annotations

import errno
import resource
import socket
from contextlib import suppress

import anyio
from anyio.abc import TaskStatus
from hypercorn.asyncio import serve
from hypercorn.config import Config

from clotho.config.addresses import is_loopback
from clotho.config.schema import ServerSection
from clotho.serving.app import build_app
from clotho.serving.limits import Traffic
from clotho.serving.services import GatewayServices
from protocols.errors import ServerError

GRACE_SECONDS = 10.0
BACKLOG = 1024
OPEN_FILES = 8192


def listen(settings: ServerSection) -> socket.socket:
    """Bind the address of the profile and listen on it.

    The process may then have `OPEN_FILES` files open, as far as the system lets it: every connection is one, and some
    systems begin with 256. Raises ServerError, one line, where it cannot be bound, or where it reaches beyond this
    machine without an API key.
    """
    host, port = settings.host, settings.port
    if not settings.api_key and not is_loopback(host):
        raise ServerError(f"server.host {host!r} is open to other machines: set server.api_key, or bind 127.0.0.1")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "stop what listens there, or choose another with --server.port (0: any free one)"
            raise ServerError(f"port {port} on {host} is already in use: {advice}") from error
        raise ServerError(f"cannot listen on {host} port {port}: {error}") from error
    allow_open_files(OPEN_FILES)
    return listener


def allow_open_files(wanted: int) -> None:
    """Raise this process' limit of open files to so many, or as near as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class ApiServer:
    """The HTTP API as an actor: `await task_group.start(gateway.run)` returns the base URL once it answers.

    When cancelled it takes no new requests, gives those in flight `grace_seconds` to finish, ends the rest with an
    error they can read, and only then returns.
    """

    name = "gateway"

    def __init__(
        self,
        services: GatewayServices,
        *,
        listener: socket.socket | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """listener: a socket from `listen`, for those who want to know early whether the port is free."""
        self._services, self._listener, self._grace_seconds = services, listener, grace_seconds
        self.requests = 0
        self.traffic = self._new_traffic()

    def _new_traffic(self) -> Traffic:
        return Traffic(self._services.settings.max_concurrent, on_admitted=self._count)

    def _count(self) -> None:
        self.requests += 1

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; run again, it binds anew. Raises ServerError if the address cannot be bound."""
        listener, self._listener = self._listener or listen(self._services.settings), None
        self.traffic = traffic = self._new_traffic()
        address, ready, stop = base_url(listener), anyio.Event(), anyio.Event()

        async def until_stopped() -> None:
            ready.set()
            await stop.wait()

        async def serve_shielded() -> None:
            with anyio.CancelScope(shield=True):
                app = build_app(self._services, traffic)
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
                    await traffic.drain(self._grace_seconds)
                stop.set()


def base_url(listener: socket.socket) -> str:
    """Return the address for clients of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(listener: socket.socket) -> Config:
    """Return Hypercorn's settings.

    Not set: read_timeout, which also ends connections whose client only waits for its answer. `read_body` has the
    deadline of bodies, keep_alive_timeout that of headers and idle connections.
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
