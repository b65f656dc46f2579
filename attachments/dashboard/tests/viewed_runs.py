"""The dashboard of run directories on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
from msgspec.structs import replace

from attachments.dashboard.view import application
from clotho.serving.server import BACKLOG, Connections, base_url, listen
from clotho.settings.server import HttpServer


class Viewed:
    """A running dashboard. stopped: ends what waits."""

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


def lines(records: Sequence[Any]) -> bytes:
    """Encode records as lines of JSON."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
