"""How many requests are in flight, and how they end when the server does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.gateway.errors import ApiError
from actors.gateway.streaming import DONE, server_sent

STOPPING = ApiError(503, "the server is shutting down", code="shutting_down", headers={"retry-after": "5"})


class Traffic:
    """The requests in flight: at most `limit`; none are let in once `drain` has begun. `on_admitted` hears of each."""

    def __init__(self, limit: int, *, on_admitted: Callable[[], None] = lambda: None) -> None:
        self.limit = limit
        self._on_admitted = on_admitted
        self.closing = False
        self._scopes: set[anyio.CancelScope] = set()
        self._empty = anyio.Event()

    @property
    def count(self) -> int:
        """Requests in flight."""
        return len(self._scopes)

    @contextmanager
    def admitted(self) -> Iterator[anyio.CancelScope]:
        """Hold one place; the scope is cancelled if the request outlives the server's patience."""
        self._on_admitted()
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)
                if self.closing and not self._scopes:
                    self._empty.set()

    async def drain(self, grace_seconds: float) -> None:
        """Let nobody in, wait for those inside, then cancel what is left."""
        self.closing = True
        if not self._scopes:
            return
        with anyio.move_on_after(grace_seconds):
            await self._empty.wait()
        for scope in tuple(self._scopes):
            scope.cancel()


class Admission:
    """Gives every POST a place in the traffic, or answers 503 with Retry-After."""

    def __init__(self, app: ASGIApp, *, traffic: Traffic) -> None:
        self._app, self._traffic = app, traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 503; a request that is cancelled from here gets a proper end."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._traffic.closing:
            await STOPPING.response()(scope, receive, send)
        elif self._traffic.count >= self._traffic.limit:
            busy = ApiError(
                503,
                f"this server answers {self._traffic.limit} requests at once; try again",
                code="overloaded",
                headers={"retry-after": "1"},
            )
            await busy.response()(scope, receive, send)
        else:
            await self._admit(scope, receive, send)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        started: list[Message] = []

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
            await send(message)

        with self._traffic.admitted() as place:
            await self._app(scope, receive, noting)
        if place.cancelled_caught:
            if not started:
                await STOPPING.response()(scope, receive, send)
            elif Headers(raw=started[0]["headers"]).get("content-type", "").startswith("text/event-stream"):
                await send({"type": "http.response.body", "body": server_sent(STOPPING.body) + DONE})
