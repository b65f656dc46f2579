"""Access control: the API key, and protection of a loopback server against requests from other web sites."""

from __future__ import annotations

import hmac
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from clotho.serving.errors import ApiError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_ROUTES = frozenset({"/health"})
BEARER = "Bearer "
LABEL = re.compile(r"[A-Za-z0-9_-]{1,32}")


class LocalOriginMiddleware:
    """Rejects browser requests from other web sites: a foreign Host header (DNS rebinding) or Origin header."""

    def __init__(self, app: ASGIApp, *, host: str) -> None:
        self._app = app
        self._names = frozenset({*LOOPBACK_NAMES, host.lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with 400."""
        headers = Headers(scope=scope) if scope["type"] in ("http", "websocket") else Headers()
        origin = headers.get("origin")
        if scope["type"] != "lifespan" and not self._is_local("//" + headers.get("host", "")):
            error = ApiError(400, "The Host header does not name this machine; use the address that the server binds.")
            await error.response()(scope, receive, send)
        elif origin is not None and not self._is_local(origin):
            error = ApiError(400, "The Origin header names another web site; send the request without a browser.")
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_local(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self._names or f"[{name}]" in self._names


class ApiKeyMiddleware:
    """Requires `Authorization: Bearer KEY` or `Bearer KEY:LABEL` on every path except /health."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with 401."""
        is_open = scope["type"] == "lifespan" or scope["path"] in OPEN_ROUTES
        if is_open or has_key(Headers(scope=scope).get("authorization", ""), self._key):
            await self._app(scope, receive, send)
        else:
            headers = {"www-authenticate": "Bearer"}
            message = "A valid API key is required; send the header `Authorization: Bearer KEY`."
            error = ApiError(401, message, code="invalid_api_key", headers=headers)
            await error.response()(scope, receive, send)


def has_key(authorization: str, key: str) -> bool:
    """Return True if the Authorization header contains the key, with or without a label. Compares in constant time."""
    expected = (BEARER + key).encode()
    whole = hmac.compare_digest(authorization.encode("latin-1"), expected)
    before_label = hmac.compare_digest(authorization.rpartition(":")[0].encode("latin-1"), expected)
    return whole | before_label


def client_label(authorization: str, *, key: str) -> str:
    """Return the label of the client: the part of the bearer token after the last colon.

    Returns an empty string if there is no label, or if the label is not 1 to 32 letters, digits, `-` and `_`.
    """
    unlabelled = key and authorization.encode("latin-1") == (BEARER + key).encode()
    if unlabelled or not authorization.startswith(BEARER):
        return ""
    _, found, label = authorization.rpartition(":")
    return label if found and LABEL.fullmatch(label) else ""
