"""What the HTTP server answers while the model is loaded: status 503, and the page of an attachment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable
from typing import TypeVar

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from clotho.extension import Door
from clotho.serving.auth import is_open
from clotho.serving.errors import ApiError
from clotho.serving.limits import UnreadBodyMiddleware
from clotho.serving.server import BACKLOG, Connections
from clotho.serving.services import Health
from clotho.settings.bounds import Off
from clotho.settings.server import HttpServer, ServerSection

RETRY_SECONDS = 2
"""Value of `Retry-After` while the model is loaded."""

T = TypeVar("T")

LOADING_PAGE: Door[[HttpServer], ASGIApp | None] = Door("attachment.loading_page")
"""Returns what a server answers on paths that need no key while the model is loaded; None: nothing."""


def loading_page(settings: ServerSection) -> ASGIApp | None:
    """Return the page that the server of a run shows while the model is loaded; None if no attachment has one."""
    return None if isinstance(settings, Off) else LOADING_PAGE.first(settings)


async def while_loading(
    listener: socket.socket | None, settings: ServerSection, loading: Awaitable[T], *, page: ASGIApp | None = None
) -> T:
    """Wait for `loading`, and answer HTTP requests with status 503 meanwhile. The listener stays open.

    page: answers requests for paths that need no key, such as the page of the dashboard.
    """
    if listener is None or isinstance(settings, Off):
        return await loading
    connections = Connections(_loading_app(settings, page), send_seconds=settings.send_seconds)
    server = await asyncio.start_server(connections.handle, sock=listener.dup(), backlog=BACKLOG)
    try:
        return await loading
    finally:
        with anyio.CancelScope(shield=True):
            server.close()
            await connections.end()


def _loading_app(settings: HttpServer, page: ASGIApp | None) -> ASGIApp:
    """Return an application that answers requests with status 503; the body of /health is a `Health`.

    page: as for `while_loading`.
    """
    detail = "The model is being loaded; retry later."
    health = Health(
        status="loading",
        detail=detail,
        model=settings.model_name,
        weights_version=0,
        step=0,
        fingerprint="",
        progress_seconds=0.0,
        children={},
        findings=(),
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Show the loading page, and refuse requests with status 503, until the model is loaded."""
        if scope["type"] != "http":
            return
        if page is not None and scope["path"] != "/health" and is_open(scope["path"]):
            await page(scope, receive, send)
            return
        headers = {"retry-after": str(RETRY_SECONDS)}
        if scope["http_version"] != "2":
            headers["connection"] = "close"  # the next request goes to the server that is ready then
        response = ApiError(503, detail, code="loading", headers=headers).response()
        if scope["path"] == "/health":
            body = msgspec.json.encode(health)
            response = Response(body, status_code=503, headers=headers, media_type="application/json")
        await response(scope, receive, send)

    return UnreadBodyMiddleware(app, send_seconds=settings.send_seconds)
