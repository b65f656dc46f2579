"""Idle connections stay open for longer than clients keep theirs, and their number is limited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio
import httpx
import pytest

from clotho.serving import server
from tests.serving.raw_connections import connect, read_all
from tests.serving.running_server import Served, serving

CLIENT_SECONDS = {"node": 5.0, "aiohttp": 15.0, "Java": 30.0, "Go": 90.0}
"""Times for which other clients keep idle connections by default."""

Advance = Callable[[float], None]


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Return a function that moves the clock of the event loop forward, so that its timers are due."""
    loop, passed = asyncio.get_running_loop(), [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + passed[0])

    def move(seconds: float) -> None:
        passed[0] += seconds

    return move


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[server.ClientWriter]:
    """Return all connections so far."""
    found: list[server.ClientWriter] = []

    class KnownWriter(server.ClientWriter):
        def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            super().__init__(reader, writer)
            found.append(self)

    monkeypatch.setattr(server, "ClientWriter", KnownWriter)
    return found


async def settle() -> None:
    """Let the timers that are due run, and what follows from them."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()


def test_the_server_closes_later_than_its_clients() -> None:
    """A client and the server that close at the same time lose a request. Numbers of requests close no connection."""
    config = server._config()
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    assert config.keep_alive_timeout > max(expiry, *CLIENT_SECONDS.values()) * 1.25
    assert config.keep_alive_max_requests > 10**9


async def test_a_client_uses_its_connection_again_at_the_end_of_its_own_limit(
    advance: Advance, connected: list[server.ClientWriter]
) -> None:
    """A real client of httpx. The clock of the server passes the client's limit; both requests use one connection."""
    async with serving() as served, httpx.AsyncClient(base_url=served.url) as client:
        expiry = httpx.Limits().keepalive_expiry
        assert expiry is not None
        for _ in range(3):
            assert (await client.get("/version")).status_code == 200
            advance(2 * expiry)
            await settle()
        assert len(connected) == 1
        assert not connected[0].is_closing()


async def test_a_connection_that_nobody_uses_is_closed(advance: Advance, connected: list[server.ClientWriter]) -> None:
    """With and without a part of a request."""
    async with serving() as served:
        for begun in (b"", b"GET /version HTTP/1.1\r\nHost: local"):
            async with await open_idle(served, connected) as stream:
                if begun:
                    await stream.send(begun)
                await settle()
                advance(server.KEEP_ALIVE_SECONDS + 1.0)
                assert await read_all(stream) == b""


async def test_the_number_of_idle_connections_is_limited(
    advance: Advance, connected: list[server.ClientWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are closed, but not before they had time for a request."""
    monkeypatch.setattr(server, "MAX_IDLE", 2)
    async with serving() as served, AsyncExitStack() as stack:
        first = [await stack.enter_async_context(await open_idle(served, connected)) for _ in range(4)]
        assert len(connected) == 4
        assert not any(one.is_closing() for one in connected)
        advance(server.FIRST_IDLE_SECONDS)
        await stack.enter_async_context(await open_idle(served, connected))
        for stream in first[:3]:
            assert await read_all(stream) == b""
        assert [one.is_closing() for one in connected] == [True, True, True, False, False]
        assert (await served.post("/v1/completions", prompt="good")).status_code == 200


async def open_idle(served: Served, connected: list[server.ClientWriter]) -> anyio.abc.SocketStream:
    """Open a connection, and wait until the server has accepted it."""
    before = len(connected)
    stream = await connect(served)
    with anyio.fail_after(30):
        while len(connected) == before:
            await anyio.lowlevel.checkpoint()
    return stream
