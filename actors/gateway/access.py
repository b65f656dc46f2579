"""Who may ask: the API key, and, on a server of this machine alone, no web page of another site."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.gateway.errors import ApiError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_ROUTES = frozenset({"/health"})


def is_loopback(host: str) -> bool:
    """Tell whether a host to bind is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class LocalPagesOnly:
    """Refuses browsers that act for another site: a foreign Host (DNS rebinding) or a foreign Origin."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._names = frozenset({*LOOPBACK_NAMES, host.lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 400."""
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        origin = headers.get("origin")
        foreign = scope["type"] != "lifespan" and not self._known("//" + headers.get("host", ""))
        if foreign:
            await ApiError(400, "the Host header does not name this machine").response()(scope, receive, send)
        elif origin is not None and not self._known(origin):
            await ApiError(400, "the Origin header names another site").response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self._names or f"[{name}]" in self._names


class ApiKey:
    """Asks for `Authorization: Bearer <key>` on every route but /health, those that do not exist included."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401; compares in constant time."""
        if scope["type"] != "lifespan" and scope["path"] not in OPEN_ROUTES:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                refusal = ApiError(
                    401, "a valid API key is required", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
