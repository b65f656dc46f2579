"""How many requests are in flight and how many in line, and how they end when the server does.

Request bodies: bounded in size and in time, and never left half read.

Hypercorn hands a body over in a queue of ten chunks and waits for ever where nobody takes them, so an answer given
before the whole body has come (401, 413, 503 ...) would hang the connection's task. `UnreadBodies` takes them.

Clients that leave while they wait: what was done for them is given up.
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
AHEAD_BYTES = 65_536


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, seconds: float) -> bytes:
    """Return the whole body.

    Raises ApiError 413 beyond `max_bytes`, declared or not, and 408 where it has not all come after `seconds`;
    ClientDisconnect if the client leaves.
    """
    declared = Headers(scope=scope).get("content-length", "")
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
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
    raise ApiError(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout")


class ReadAhead:
    """What comes of a body while its request waits; `receive` hands it on first."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._held: deque[Message] = deque()
        self._size = 0

    async def peek(self) -> Message:
        """Return the next message and hold it; wait for ever once `AHEAD_BYTES` of the body are held."""
        if self._size >= AHEAD_BYTES:
            await anyio.sleep_forever()
        message = await self._receive()
        self._held.append(message)
        self._size += len(message.get("body", b""))
        return message

    async def receive(self) -> Message:
        """Return the next message."""
        return self._held.popleft() if self._held else await self._receive()


class UnreadBodies:
    """Takes what a client still sends when its answer is ready, and gives up on clients that do not read theirs.

    After an early answer the connection lingers for `LINGER_SECONDS`, so that the client can read it before the
    connection is closed under what it still sends. A client that takes nothing for `SEND_SECONDS` loses its request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with anyio.CancelScope() as whole:
            exchange = _Exchange(receive, send, whole)
            await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    def __init__(self, receive: Receive, send: Send, scope: anyio.CancelScope) -> None:
        self._receive, self._send, self._scope = receive, send, scope
        self._body_ended = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._body_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self._scope.deadline = anyio.current_time() + SEND_SECONDS
        if message["type"] != "http.response.body" or message.get("more_body", False) or await self._is_read():
            await self._send(message)
        else:
            await self._finish_unread(message)
        self._scope.deadline = math.inf

    async def _is_read(self) -> bool:
        """Tell whether the whole body has been taken, after taking what has already come."""
        if not self._body_ended:
            with anyio.move_on_after(0):
                await self._take_body()
        return self._body_ended

    async def _finish_unread(self, last: Message) -> None:
        await self._send({**last, "more_body": True})
        with anyio.move_on_after(LINGER_SECONDS):
            await self._take_body()
        async with anyio.create_task_group() as group:
            group.start_soon(self._take_everything)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            group.cancel_scope.cancel()

    async def _take_body(self) -> None:
        while not self._body_ended:
            await self.receive()

    async def _take_everything(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


T = TypeVar("T")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Await the work; if the client leaves first, cancel it and raise ClientDisconnect."""
    gone = False
    failure: Exception | None = None
    results: list[T] = []

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            results.append(await work)
        except Exception as error:
            failure = error
        group.cancel_scope.cancel()
    if gone:
        raise ClientDisconnect
    if failure is not None:
        raise failure
    return results[0]


LONGEST_LINE = 4096
"""Requests that may wait for a place. They wait here because clients that are told to come back often give up: those of
Atropos after three attempts within seconds, and the work of the whole group is lost."""
STOPPING = ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


class Traffic:
    """The requests in flight: at most `limit`, the others wait in line, first come, first served.

    None are let in once `drain` has begun. `on_admitted` hears of each that is.
    """

    def __init__(self, limit: int, *, on_admitted: Callable[[], None] = lambda: None) -> None:
        self._on_admitted = on_admitted
        self.closing = False
        self._free = limit
        self._line: deque[anyio.Event] = deque()
        self._waiting: set[anyio.CancelScope] = set()
        self._inside: set[anyio.CancelScope] = set()
        self._empty = anyio.Event()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def is_full(self) -> bool:
        """Whether there is neither a place nor a place in the line."""
        return not self._free and len(self._line) >= LONGEST_LINE

    @asynccontextmanager
    async def admitted(self, scope: anyio.CancelScope, receive: Receive) -> AsyncIterator[None]:
        """Hold one place, once there is one; `scope` is cancelled if the server's patience ends first.

        receive: of the request; raises ClientDisconnect where the client leaves the line.
        """
        self._waiting.add(scope)
        try:
            await self._turn(receive)
        finally:
            self._waiting.discard(scope)
        self._inside.add(scope)
        self._on_admitted()
        try:
            yield
        finally:
            self._inside.discard(scope)
            self._leave()
            if self.closing and not self._inside:
                self._empty.set()

    async def _turn(self, receive: Receive) -> None:
        """Take a free place, or wait until one is handed over."""
        if self._free:
            self._free -= 1
            return
        turn = anyio.Event()
        self._line.append(turn)
        try:
            await until_disconnect(receive, turn.wait())
        except BaseException:
            if turn.is_set():
                self._leave()
            else:
                self._line.remove(turn)
            raise

    def _leave(self) -> None:
        if self._line:
            self._line.popleft().set()
        else:
            self._free += 1

    async def drain(self, grace_seconds: float) -> None:
        """Let nobody in, send the line away, wait for those inside, then cancel what is left."""
        self.closing = True
        for scope in tuple(self._waiting):
            scope.cancel()
        if not self._inside:
            return
        with anyio.move_on_after(grace_seconds):
            await self._empty.wait()
        for scope in tuple(self._inside):
            scope.cancel()


class Admission:
    """Gives every POST a place in the traffic, in its turn; 503 with Retry-After where the line is full."""

    def __init__(self, app: ASGIApp, *, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503; a request that is cancelled from here gets a proper end."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._traffic.closing:
            await STOPPING.response()(scope, receive, send)
        elif self._traffic.is_full:
            message = f"{LONGEST_LINE} requests wait already; try again later"
            busy = ApiError(503, message, code="overloaded", headers={"retry-after": "1"})
            await busy.response()(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        started: list[Message] = []

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            await send(message)

        body = ReadAhead(receive)
        with anyio.CancelScope() as place, suppress(ClientDisconnect):
            async with self._traffic.admitted(place, body.peek):
                await self._app(scope, body.receive, noting)
        if place.cancelled_caught:
            if not started:
                await STOPPING.response()(scope, receive, send)
            elif Headers(raw=started[0]["headers"]).get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": server_sent(STOPPING.body) + DONE})
