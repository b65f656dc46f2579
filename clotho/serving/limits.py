"""Limits of the server: concurrent requests, unread request bodies, and clients that disconnect or do not read.

Hypercorn passes a request body through a queue of ten chunks and blocks if the application does not read them. A
response that is sent before the whole body has arrived (401, 413, 503) would therefore block the connection's task.
`UnreadBodyMiddleware` reads the rest of the body.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clotho.lanes.fair_queue import FairQueue
from clotho.serving.auth import Client, client_of
from clotho.serving.bodies import RequestBodies
from clotho.serving.errors import ApiError, error_body, overloaded

LINGER_SECONDS = 2.0
MAX_QUEUED_REQUESTS = 4096
"""Requests that may wait for admission; twice as many with those of clients that have less than an equal part.

The server queues requests instead of rejecting them because clients such as Atropos give up after three attempts within
seconds, and the work for the whole group would be lost."""
SHUTTING_DOWN = ApiError(
    503, "The server is shutting down; retry later.", code="shutting_down", headers={"retry-after": "5"}
)

T = TypeVar("T")


class UnreadBodyMiddleware:
    """Reads the rest of a request body when the response is ready, and cancels requests of clients that do not read.

    After an early response the connection stays open for up to `LINGER_SECONDS`, so that the client can read the
    response before the connection closes. A request is cancelled if its client does not accept data for `send_seconds`.
    """

    def __init__(self, app: ASGIApp, *, send_seconds: float) -> None:
        self._app, self._send_seconds = app, send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as request_scope:
            connection = _Connection(receive, send, request_scope, self._send_seconds)
            await self._app(scope, connection.receive, connection.send)


class _Connection:
    """One request with its response. scope: ends the request if the client does not accept data in time."""

    def __init__(self, receive: Receive, send: Send, scope: anyio.CancelScope, send_seconds: float) -> None:
        self._receive, self._send, self._scope, self._send_seconds = receive, send, scope, send_seconds
        self._body_ended = False

    async def receive(self) -> Message:
        """Receive a message, and note the end of the body."""
        message = await self._receive()
        self._body_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message within the time limit, the last one after the rest of the body was read."""
        self._scope.deadline = anyio.current_time() + self._send_seconds
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
    """At most `limit` requests run at the same time; further requests wait in a queue that is fair between clients.

    Every request counts alike in this queue; requests of one client are admitted in order of arrival. A full queue
    still takes requests of clients that have less than an equal part of it, up to twice its size.
    No request is admitted after `drain` has been called. `on_admitted` is called for every admitted request.

    stopped: set by `drain`.
    """

    def __init__(self, limit: int, *, on_admitted: Callable[[], None] | None = None, wait_seconds: float = 0.0) -> None:
        """wait_seconds: maximum time in the queue; 0: no limit."""
        self._on_admitted = on_admitted
        self._wait_seconds = wait_seconds or math.inf
        self.closing = False
        self.stopped = anyio.Event()
        self.timed_out = 0
        self._free = limit
        self._queue = FairQueue[anyio.Event]()
        self._waiting: set[anyio.CancelScope] = set()
        self._running: set[anyio.CancelScope] = set()
        self._idle = anyio.Event()

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return self._queue.length

    @property
    def running(self) -> int:
        """Number of requests that are admitted and not finished."""
        return len(self._running)

    def is_full(self, client: Client) -> bool:
        """Return whether neither a request of this client can be admitted nor the queue has room for it."""
        if self._free or self._queue.length < MAX_QUEUED_REQUESTS:
            return False
        part = MAX_QUEUED_REQUESTS // (self._queue.clients + 1)
        return self._queue.waiting(client.name) >= part or self._queue.length >= 2 * MAX_QUEUED_REQUESTS

    @contextmanager
    def waiting(self, scope: anyio.CancelScope) -> Iterator[None]:
        """Within the block, `drain` cancels the scope at once."""
        self._waiting.add(scope)
        try:
            yield
        finally:
            self._waiting.discard(scope)

    @asynccontextmanager
    async def admitted(self, scope: anyio.CancelScope, receive: Receive, client: Client) -> AsyncIterator[None]:
        """Count as running until the block ends, once admitted. Raises ClientDisconnect, or ApiError with 503."""
        with self.waiting(scope):
            await self._acquire(receive, client)
        self._running.add(scope)
        if self._on_admitted is not None:
            self._on_admitted()
        try:
            yield
        finally:
            self._running.discard(scope)
            self._release()
            if self.closing and not self._running:
                self._idle.set()

    async def _acquire(self, receive: Receive, client: Client) -> None:
        """Take a free slot, or wait until `_release` passes one on."""
        if self._free:
            self._free -= 1
            return
        admitted = anyio.Event()
        self._queue.put(client.name, admitted, 1.0)
        try:
            with anyio.fail_after(self._wait_seconds):
                await until_disconnect(receive, admitted.wait())
        except BaseException as error:
            if admitted.is_set():
                self._release()
            else:
                self._queue.remove(lambda one: one is admitted)
            if isinstance(error, TimeoutError):
                self.timed_out += 1
                raise overloaded(f"The request waited {self._wait_seconds:g} seconds; retry later.") from None
            raise

    def _release(self) -> None:
        if self._queue.length:
            self._queue.take().set()
        else:
            self._free += 1

    async def drain(self, grace_seconds: float) -> None:
        """Stop admission, cancel the queued requests, wait for the running requests, then cancel the rest."""
        self.closing = True
        self.stopped.set()
        for scope in tuple(self._waiting):
            scope.cancel()
        if not self._running:
            return
        with anyio.move_on_after(grace_seconds):
            await self._idle.wait()
        for scope in tuple(self._running):
            scope.cancel()


class AdmissionMiddleware:
    """Reads the body of every POST request to `paths`, then applies the concurrency limit.

    A request whose body has not arrived completely holds no slot. Responds with 503 and Retry-After if the queue is
    full, with 429 if the quota of the client is used up, and with the error of `RequestBodies` for a body that is
    refused.
    """

    def __init__(self, app: ASGIApp, *, paths: Collection[str], limit: ConcurrencyLimit, bodies: RequestBodies) -> None:
        self._app, self._paths, self._limit, self._bodies = app, paths, limit, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with an error."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
        elif self._limit.closing:
            await SHUTTING_DOWN.response()(scope, receive, send)
        elif self._limit.is_full(client_of(scope)):
            await self._full().response()(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    @staticmethod
    def _full() -> ApiError:
        return overloaded(f"The queue is full ({MAX_QUEUED_REQUESTS} requests wait); retry later.")

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. A request that `drain` cancels receives a complete error response or a final event."""
        started: list[Message] = []

        async def recording_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            await send(message)

        with anyio.CancelScope() as request_scope, suppress(ClientDisconnect):
            try:
                await self._run(request_scope, scope, receive, recording_send)
            except ApiError as error:
                await error.response()(scope, receive, send)
        if request_scope.cancelled_caught:
            if not started:
                await SHUTTING_DOWN.response()(scope, receive, send)
            elif Headers(raw=started[0]["headers"]).get("content-type", "").startswith("text/event-stream"):
                from clotho.serving.openai_responses import DONE, server_sent

                body = error_body(SHUTTING_DOWN, scope)
                await send({"type": "http.response.body", "body": server_sent(body, body.event) + DONE})

    async def _run(self, request_scope: anyio.CancelScope, scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(scope)
        async with AsyncExitStack() as stack:
            stack.enter_context(client.request())
            with self._limit.waiting(request_scope):
                body = await stack.enter_async_context(self._bodies.read(scope, receive))
            if self._limit.is_full(client):
                raise self._full()
            await stack.enter_async_context(self._limit.admitted(request_scope, receive, client))
            await self._app(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns the whole body first, and then the messages of `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
