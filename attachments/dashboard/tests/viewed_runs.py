"""The dashboard of run directories on a real server, and a reader of its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from msgspec.structs import replace

from attachments.dashboard.view import application
from clotho.serving.server import BACKLOG, Connections, base_url, listen
from clotho.settings.server import HttpServer

EVENTS = "/dashboard/api/runs/0/events"


class Viewed:
    """A running dashboard. stopped: ends its streams."""

    def __init__(self, http: httpx.AsyncClient, url: str, stopped: anyio.Event) -> None:
        self.http, self.url, self.stopped = http, url, stopped

    async def get(self, path: str, run: int = 0) -> Any:
        """Return the body of an API response with status 200."""
        answer = await self.http.get(f"/dashboard/api/runs/{run}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()


@asynccontextmanager
async def viewing(*runs: Path, **settings: Any) -> AsyncIterator[Viewed]:
    """Serve the dashboard of some runs on a free port; keyword arguments are keys of [server]."""
    chosen = replace(HttpServer(port=0), **settings)
    stopped = anyio.Event()
    connections = Connections(application(runs, chosen, stopped), send_seconds=chosen.send_seconds)
    listener = listen(chosen)
    server = await asyncio.start_server(connections.handle, sock=listener, backlog=BACKLOG)
    url = base_url(listener)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
            yield Viewed(http, url, stopped)
    finally:
        stopped.set()
        server.close()
        await connections.end()


class Event(msgspec.Struct):
    """One server-sent event."""

    name: str
    data: Any
    id: str


async def events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream."""
    fields = dict[str, str]()
    async for line in response.aiter_lines():
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "event" in fields:
            yield Event(fields["event"], msgspec.json.decode(fields["data"]), fields.get("id", ""))
            fields = {}


@asynccontextmanager
async def following(http: httpx.AsyncClient, last_id: str = "") -> AsyncIterator[AsyncGenerator[Event, None]]:
    """Follow the events of the first run. last_id: id of the last event that was received."""
    headers = {"last-event-id": last_id} if last_id else {}
    async with http.stream("GET", EVENTS, headers=headers) as response, aclosing(events(response)) as stream:
        assert response.headers["content-type"].startswith("text/event-stream")
        yield stream


async def read_until(stream: AsyncIterator[Event], *names: str) -> list[Event]:
    """Return the events of a stream up to the last of the named ones."""
    missing, found = list(names), list[Event]()
    async for one in stream:
        found.append(one)
        if one.name in missing:
            missing.remove(one.name)
        if not missing:
            return found
    raise AssertionError(f"the stream ended without {missing}")


def lines(records: Sequence[Any]) -> bytes:
    """Encode records as lines of JSON."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
