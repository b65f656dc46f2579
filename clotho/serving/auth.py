"""Who may ask: the API key, and, on a server of this machine alone, no web page of another site."""

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
    """Asks for `Authorization: Bearer <key>` or `Bearer <key>:<label>` on every route but /health, unknown ones too."""

    def __init__(self, app: ASGIApp, *, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        is_open = scope["type"] == "lifespan" or scope["path"] in OPEN_ROUTES
        if is_open or has_key(Headers(scope=scope).get("authorization", ""), self._key):
            await self._app(scope, receive, send)
        else:
            headers = {"www-authenticate": "Bearer"}
            refusal = ApiError(401, "a valid API key is required", code="invalid_api_key", headers=headers)
            await refusal.response()(scope, receive, send)


def has_key(authorization: str, key: str) -> bool:
    """Tell whether the header has the key, with a label behind it or without; compares in constant time."""
    expected = (BEARER + key).encode()
    whole = hmac.compare_digest(authorization.encode("latin-1"), expected)
    before_label = hmac.compare_digest(authorization.rpartition(":")[0].encode("latin-1"), expected)
    return whole | before_label


def client_label(authorization: str, *, key: str) -> str:
    """Return the label that the client gave itself, behind its key or what stands there where no key is asked for.

    Empty where there is none, or none of at most 32 letters, digits, `-` and `_`.
    """
    unlabelled = key and authorization.encode("latin-1") == (BEARER + key).encode()
    if unlabelled or not authorization.startswith(BEARER):
        return ""
    _, found, label = authorization.rpartition(":")
    return label if found and LABEL.fullmatch(label) else ""
