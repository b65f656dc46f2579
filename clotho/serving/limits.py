"""How many requests are in flight and how many in line, and how they end when the server does."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clotho.serving.body import ReadAhead
from clotho.serving.disconnect import until_disconnect
from clotho.serving.errors import ApiError
from clotho.serving.streaming import DONE, server_sent

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
