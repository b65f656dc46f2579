"""The server actor: Hypercorn in this process, with a readiness handshake and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice

import anyio
from anyio.abc import TaskStatus
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Event, Updated
from hypercorn.typing import AppWrapper
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp

from clotho.serving.app import build_app
from clotho.serving.auth import CLIENT_KEYS
from clotho.serving.limits import ConcurrencyLimit
from clotho.serving.parts import ServerParts
from clotho.serving.services import ServerContext
from clotho.settings.server import HttpServer, is_loopback
from protocols.errors import ServerError

BACKLOG = 1024
OPEN_FILES = 8192

SOCKET_BUFFER_BYTES = 65_536
"""Bytes of a connection that the system keeps for its client. By default, Linux keeps up to 4 MB."""

BUFFER_BYTES = 32_768
"""Bytes of a connection that may wait for its client before the next write has to wait."""

KEEP_ALIVE_SECONDS = 120.0
"""Time for which an idle connection stays open. It is longer than clients keep theirs (node 5 s, httpx and with it
OpenAI's client 5 s, aiohttp 15 s, Java 30 s, Go 90 s): a request that a client sends on an idle connection while the
server closes it is lost, and clients do not repeat a POST. The headers of a request must arrive in the same time."""

MAX_IDLE, FIRST_IDLE_SECONDS = 1024, 5.0
"""Idle connections that stay open. If there are more, those that have been idle for `FIRST_IDLE_SECONDS` are closed,
the oldest first; many clients that have just connected are not closed."""

END_SECONDS = 3.0
"""Time in which connections may send what waits for their clients, when the server stops."""


def listen(settings: HttpServer) -> socket.socket:
    """Bind the configured address and listen on it.

    Also raises this process's limit of open files, because every connection is an open file and some systems start with
    a limit of 256. Raises ServerError if the address cannot be bound, or if it is not a loopback address and there is
    no API key; ProfileError if the file of API keys is not valid.
    """
    host, port = settings.host, settings.port
    if not (any(CLIENT_KEYS(settings)) or settings.api_key or is_loopback(host)):
        raise ServerError(
            f"server.host {host!r} is reachable from other machines: set server.api_keys_file or server.api_key, or "
            "bind 127.0.0.1"
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
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)  # connections inherit both options
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise a body waits 40 ms for an ACK of headers
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

    parts: what it is built from, for its whole life.
    """

    name = "server"

    def __init__(
        self,
        context: ServerContext,
        *,
        listener: socket.socket | None = None,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        """listener: a socket from `listen`, bound before the run starts; None: bind in `run`.

        on_request: called for each admitted request. Raises ProfileError if the file of API keys is not valid.
        """
        self.parts = ServerParts(context)
        self._settings, self._listener = context.settings, listener
        self._on_request = on_request
        self.limit = self._new_limit()

    def _new_limit(self) -> ConcurrencyLimit:
        return ConcurrencyLimit(
            self._settings.max_concurrent,
            on_admitted=self._on_request,
            wait_seconds=self._settings.max_queue_seconds,
        )

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; a second call binds the address again. Raises ServerError if it cannot be bound."""
        listener, self._listener = self._listener or listen(self._settings), None
        self.limit = limit = self._new_limit()
        settings = self._settings
        connections = Connections(build_app(self.parts, limit), send_seconds=settings.send_seconds)
        server = await asyncio.start_server(connections.handle, sock=listener, backlog=BACKLOG)
        try:
            task_status.started(base_url(listener))
            await connections.watch()
        finally:
            with anyio.CancelScope(shield=True):
                await limit.drain(settings.shutdown_seconds)
                server.close()
                await connections.end()


class Connections:
    """The connections of a server, with Hypercorn's protocols on them.

    Hypercorn's own server keeps a connection until its client has read everything. A client that does not read would
    then hold memory for ever, and the server would not end.
    """

    def __init__(self, app: ASGIApp, *, send_seconds: float) -> None:
        """send_seconds: time after which a client that reads nothing is disconnected."""
        self._app, self._send_seconds = wrap_app(app, 0, "asgi"), send_seconds  # type: ignore[arg-type]
        self._config, self._context = _config(), WorkerContext(None)
        self._clients: dict[asyncio.Task[None], ClientWriter] = {}
        self._idle: dict[ClientWriter, float] = {}  # since when, the longest first

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = client = ClientWriter(reader, writer)
        try:
            with suppress(asyncio.CancelledError):  # by `end`; asyncio of Python 3.11 reports a cancelled handler
                await _Connection(self._app, self._config, self._context, reader, client, on_idle=self._mark)
        finally:
            del self._clients[task]
            self._idle.pop(client, None)

    def _mark(self, client: ClientWriter, *, idle: bool) -> None:
        """Note that a connection waits for a request, or does not; close the oldest ones if too many wait."""
        self._idle.pop(client, None)
        if idle:
            self._idle[client] = anyio.current_time()
        self._close_idle()

    def _close_idle(self) -> None:
        surplus, latest = len(self._idle) - MAX_IDLE, anyio.current_time() - FIRST_IDLE_SECONDS
        for client in [one for one, since in islice(self._idle.items(), max(0, surplus)) if since <= latest]:
            del self._idle[client]
            client.close()

    async def watch(self) -> None:
        """Disconnect clients that do not read, and idle ones if there are too many, until cancelled."""
        while True:
            await anyio.sleep(self._send_seconds / 4)
            self._close_idle()
            for client in self._clients.values():
                client.disconnect_if_idle(self._send_seconds)

    async def end(self) -> None:
        """Close idle connections at once, and all others after `END_SECONDS`."""
        await self._context.terminated.set()
        if self._clients:
            await asyncio.wait(self._clients, timeout=END_SECONDS)
        for task, client in self._clients.items():
            client.transport.abort()
            task.cancel()
        if self._clients:
            await asyncio.wait(self._clients)


class _Connection(TCPServer):
    """One connection, which tells when it begins and ends to wait for a request."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        reader: asyncio.StreamReader,
        client: ClientWriter,
        *,
        on_idle: Callable[..., None],
    ) -> None:
        super().__init__(app, asyncio.get_running_loop(), config, context, {}, reader, client)
        self._on_idle = partial(on_idle, client)
        self._on_idle(idle=True)

    async def protocol_send(self, event: Event) -> None:
        """Handle an event of the protocol."""
        if isinstance(event, Updated):
            self._on_idle(idle=event.idle)
        await super().protocol_send(event)


class ClientWriter(asyncio.StreamWriter):
    """The writing side of a connection, with a small buffer, and a count of the bytes that the client has accepted."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(writer.transport, writer.transport.get_protocol(), reader, loop)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        self._written, self._accepted, self._accepted_at = 0, 0, anyio.current_time()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send data, or let the data wait for the client."""
        if not self.transport.get_write_buffer_size():
            self._accepted_at = anyio.current_time()
        self._written += len(data)
        super().write(data)

    def disconnect_if_idle(self, seconds: float) -> None:
        """Close the connection at once if data wait for the client and it has accepted none for `seconds`."""
        waiting, now = self.transport.get_write_buffer_size(), anyio.current_time()
        if self._written - waiting > self._accepted:
            self._accepted, self._accepted_at = self._written - waiting, now
        elif waiting and now - self._accepted_at >= seconds:
            self.transport.abort()


def base_url(listener: socket.socket) -> str:
    """Return the base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config() -> Config:
    """Return Hypercorn's settings.

    read_timeout stays unset because it also closes connections whose client waits for its response. `RequestBodies`
    limits the time for request bodies, and keep_alive_timeout limits the time for headers and idle connections.
    keep_alive_max_requests is unlimited, because Hypercorn ends all requests of an HTTP/2 connection that reaches it.
    """
    config = Config()
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    config.h11_max_incomplete_size = 16 * 1024
    config.h2_max_concurrent_streams = 100
    config.keep_alive_timeout = KEEP_ALIVE_SECONDS
    config.keep_alive_max_requests = sys.maxsize
    return config
