"""Limits of the server: concurrent requests, size and duration of request bodies, and disconnected clients.

Hypercorn passes a request body through a queue of ten chunks and blocks if the application does not read them. A
response that is sent before the whole body has arrived (401, 413, 503) would therefore block the connection's task.
`UnreadBodyMiddleware` reads the rest of the body.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clotho.serving.errors import ApiError
from clotho.serving.streaming import DONE, server_sent

LINGER_SECONDS = 2.0
SEND_SECONDS = 60.0
BUFFER_BYTES = 65_536
MAX_QUEUED_REQUESTS = 4096
"""Requests that may wait for admission. The server queues requests instead of rejecting them because clients such as
Atropos give up after three attempts within seconds, and the work for the whole group would be lost."""
SHUTTING_DOWN = ApiError(
    503, "The server is shutting down; retry later.", code="shutting_down", headers={"retry-after": "5"}
)

T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, seconds: float) -> bytes:
    """Return the whole request body.

    Raises ApiError with status 413 if the body is larger than `max_bytes`, with status 408 if it has not arrived
    completely after `seconds`, and ClientDisconnect if the client disconnects.
    """
    declared = Headers(scope=scope).get("content-length", "")
    too_large = ApiError(413, f"The request body is larger than the limit of {max_bytes} bytes.", code="body_too_large")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    with anyio.move_on_after(seconds):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > max_bytes:
                raise too_large
            if not message.get("more_body", False):
                return b"".join(chunks)
    raise ApiError(408, f"The request body did not arrive within {seconds:g} seconds.", code="body_timeout")


class BodyBuffer:
    """Buffers the body of a request that waits for admission; `receive` returns the buffered messages first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._buffered: deque[Message] = deque()
        self._size = 0

    async def peek(self) -> Message:
        """Buffer the next message and return it. Never returns once `BUFFER_BYTES` of the body are buffered."""
        if self._size >= BUFFER_BYTES:
            await anyio.sleep_forever()
        message = await self._receive()
        self._buffered.append(message)
        self._size += len(message.get("body", b""))
        return message

    async def receive(self) -> Message:
        """Return the next message."""
        return self._buffered.popleft() if self._buffered else await self._receive()


class UnreadBodyMiddleware:
    """Reads the rest of a request body when the response is ready, and cancels requests of clients that do not read.

    After an early response the connection stays open for up to `LINGER_SECONDS`, so that the client can read the
    response before the connection closes. A request is cancelled if its client does not accept data for `SEND_SECONDS`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as request_scope:
            connection = _Connection(receive, send, request_scope)
            await self._app(scope, connection.receive, connection.send)


class _Connection:
    def __init__(self, receive: Receive, send: Send, scope: anyio.CancelScope) -> None:
        self._receive, self._send, self._scope = receive, send, scope
        self._body_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._body_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self._scope.deadline = anyio.current_time() + SEND_SECONDS
        if message["type"] != "http.response.body" or message.get("more_body", False) or await self._body_is_read():
            await self._send(message)
        else:
            await self._finish_with_unread_body(message)
        self._scope.deadline = math.inf

    async def _body_is_read(self) -> bool:
        """Read the part of the body that has already arrived; return True if that was the rest of it."""
        if not self._body_ended:
            with anyio.move_on_after(0):
                await self._read_body()
        return self._body_ended

    async def _finish_with_unread_body(self, last: Message) -> None:
        await self._send({**last, "more_body": True})
        with anyio.move_on_after(LINGER_SECONDS):
            await self._read_body()
        async with anyio.create_task_group() as group:
            group.start_soon(self._read_until_disconnect)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()

    async def _read_body(self) -> None:
        while not self._body_ended:
            await self.receive()

    async def _read_until_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""
    disconnected = False
    failure: Exception | None = None
    results: list[T] = []

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work)
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if disconnected:
        raise ClientDisconnect
    if failure is not None:
        raise failure
    return results[0]


class ConcurrencyLimit:
    """At most `limit` requests run at the same time; further requests wait in a first-in, first-out queue.

    No request is admitted after `drain` has been called. `on_admitted` is called for every admitted request.
    """

    def __init__(self, limit: int, *, on_admitted: Callable[[], None] = lambda: None) -> None:
        self._on_admitted = on_admitted
        self.closing = False
        self._free = limit
        self._queue: deque[anyio.Event] = deque()
        self._waiting: set[anyio.CancelScope] = set()
        self._running: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Number of requests that are admitted and not finished."""
        return len(self._running)

    @property
    def is_full(self) -> bool:
        """Whether neither a request can be admitted nor the queue has room."""
        return not self._free and len(self._queue) >= MAX_QUEUED_REQUESTS

    @asynccontextmanager
    async def admitted(self, scope: anyio.CancelScope, receive: Receive) -> AsyncIterator[None]:
        """Wait for admission and count as running until the block ends.

        scope: cancelled by `drain`. receive: of the request. Raises ClientDisconnect if the client disconnects while
        the request waits.
        """
        self._waiting.add(scope)
        try:
            await self._acquire(receive)
        finally:
            self._waiting.discard(scope)
        self._running.add(scope)
        self._on_admitted()
        try:
            yield
        finally:
            self._running.discard(scope)
            self._release()
            if self.closing and not self._running:
                self._idle.set()

    async def _acquire(self, receive: Receive) -> None:
        """Take a free slot, or wait until `_release` passes one on."""
        if self._free:
            self._free -= 1
            return
        admitted = anyio.Event()
        self._queue.append(admitted)
        try:
            await until_disconnect(receive, admitted.wait())
        except BaseException:
            if admitted.is_set():
                self._release()
            else:
                self._queue.remove(admitted)
            raise

    def _release(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._free += 1

    async def drain(self, grace_seconds: float) -> None:
        """Stop admission, cancel the queued requests, wait for the running requests, then cancel the rest."""
        self.closing = True
        for scope in tuple(self._waiting):
            scope.cancel()
        if not self._running:
            return
        with anyio.move_on_after(grace_seconds):
            await self._idle.wait()
        for scope in tuple(self._running):
            scope.cancel()


class AdmissionMiddleware:
    """Applies the concurrency limit to every POST request; responds with 503 and Retry-After if the queue is full."""

    def __init__(self, app: ASGIApp, *, limit: ConcurrencyLimit) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with 503."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._limit.closing:
            await SHUTTING_DOWN.response()(scope, receive, send)
        elif self._limit.is_full:
            message = f"The queue is full ({MAX_QUEUED_REQUESTS} requests wait); retry later."
            error = ApiError(503, message, code="overloaded", headers={"retry-after": "1"})
            await error.response()(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. A request that `drain` cancels receives a complete error response or a final event."""
        started: list[Message] = []

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            await send(message)

        body = BodyBuffer(receive)
        with anyio.CancelScope() as request_scope, suppress(ClientDisconnect):
            async with self._limit.admitted(request_scope, body.peek):
                await self._app(scope, body.receive, recording_send)
        if request_scope.cancelled_caught:
            if not started:
                await SHUTTING_DOWN.response()(scope, receive, send)
            elif Headers(raw=started[0]["headers"]).get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": server_sent(SHUTTING_DOWN.body) + DONE})
