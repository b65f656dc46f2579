"""Request bodies: bounded in size and in time, and never left half read.

Hypercorn hands a body over in a queue of ten chunks and waits for ever where nobody takes them, so an answer given
before the whole body has come (401, 413, 503 ...) would hang the connection's task. `UnreadBodies` takes them.
"""

from __future__ import annotations

import math
from collections import deque

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clotho.serving.errors import ApiError

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
