"""Access control: clients by API key or address, and protection of a loopback server from other web sites."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol
from urllib.parse import urlsplit

from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from clotho.extension import Door
from clotho.serving.errors import ApiError
from clotho.settings.server import HttpServer

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
OPEN_ROUTES = frozenset({"/health", "/"})
OPEN_FILES = "/dashboard/static/"
"""Paths that need no key: they return no data of the run. A browser cannot send a key when it loads a page."""

BEARER = "Bearer "
KEY_HEADER = "x-api-key"
"""Header of clients of Anthropic, which send a key without `Bearer`."""
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
        app, message = self._app, ""
        if scope["type"] != "lifespan" and not self._is_local("//" + headers.get("host", "")):
            message = "The Host header does not name this machine; use the address that the server binds."
        elif origin is not None and not self._is_local(origin):
            message = "The Origin header names another web site; send the request without a browser."
        if message:
            app = ApiError(400, message).response()
        await app(scope, receive, send)

    def _is_local(self, url: str) -> bool:
        try:
            name = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return name in self._names or f"[{name}]" in self._names


@dataclass(slots=True)
class Reservation:
    """Tokens that a request may use. unused: tokens that it did not use; set when it ends."""

    unused: int = 0


class Quota(Protocol):
    """What the requests of one API key may use. All methods belong to the event loop."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Number of refused requests by limit."""

    def request(self) -> AbstractContextManager[None]:
        """Count a request from its arrival to its end. Raises ApiError with status 429."""

    def reserved(self, tokens: int, /) -> AbstractContextManager[Reservation]:
        """Count tokens of a request until its end. Raises ApiError with status 429, or 400 if they never fit."""


class ClientKey(Struct, frozen=True, kw_only=True):
    """An API key. digest: see `key_digest`; the key itself is not kept. admin: may control the server.

    name: of its client; empty: clients are named after their addresses. quota: None: no limits.
    """

    name: str
    digest: bytes
    admin: bool
    quota: Quota | None = None


def key_digest(secret: bytes) -> bytes:
    """Return the SHA-256 of a key. Keys are looked up by it, so that the time of a lookup reveals nothing of a key."""
    return sha256(secret).digest()


CLIENT_KEYS: Door[[HttpServer], Sequence[ClientKey]] = Door("library.client_keys")
"""Returns API keys of a server, beside `server.api_key`. Raises ProfileError if one is not valid."""


class Client(Struct, frozen=True, kw_only=True):
    """The client of a request.

    name: that of its API key in `server.api_keys_file`, else its network address; on a loopback address with its label.
    label: name that the client gives itself. quota: of its key. arrived: time of arrival, in seconds of `monotonic`.
    is_admin: whether it may control the server and what belongs to other clients: true for keys with `admin`, for
    `server.api_key`, and for every client of a server without keys, which only programs of this machine reach.
    """

    name: str
    label: str = ""
    quota: Quota | None = None
    is_admin: bool = False
    arrived: float

    @property
    def owner(self) -> str:
        """Name under which its adapters and requests belong to it; empty for administrators, who own everything."""
        return "" if self.is_admin else self.name

    def request(self) -> AbstractContextManager[None]:
        """Count a request of this client until its end. Raises ApiError with status 429."""
        return nullcontext() if self.quota is None else self.quota.request()

    def reserved(self, tokens: int) -> AbstractContextManager[Reservation]:
        """Count tokens of a request of this client until its end. Raises ApiError with status 429 or 400."""
        return nullcontext(Reservation()) if self.quota is None else self.quota.reserved(tokens)


class Clients:
    """Identifies clients by their API key, or by their address. quotas: by the name of the key."""

    def __init__(self, settings: HttpServer) -> None:
        """Raise ProfileError if the API keys are not valid."""
        named = [key for keys in CLIENT_KEYS(settings) for key in keys]
        self.quotas = {key.name: key.quota for key in named if key.quota is not None}
        self._keys = {key.digest: key for key in named}
        if settings.api_key:
            digest = key_digest(settings.api_key.encode())
            self._keys.setdefault(digest, ClientKey(name="", digest=digest, admin=True))

    def find(self, scope: Scope) -> Client | None:
        """Return the client of a request; None if the server has keys and the request has none of them."""
        headers, now = Headers(scope=scope), time.monotonic()
        authorization = headers.get("authorization", "")
        token = authorization.removeprefix(BEARER) if authorization.startswith(BEARER) else headers.get(KEY_HEADER, "")
        before, colon, label = token.rpartition(":")
        label = label if colon and LABEL.fullmatch(label) else ""
        if self._keys:
            whole, labelled = (self._keys.get(key_digest(part.encode("latin-1"))) for part in (token, before))
            key = labelled if whole is None else whole
            if key is None:
                return None
            label = label if whole is None else ""
            if key.name:
                return Client(name=key.name, label=label, quota=key.quota, is_admin=key.admin, arrived=now)
        return Client(name=_address(scope, label), label=label, is_admin=True, arrived=now)


def _address(scope: Scope, label: str) -> str:
    """Return the address of a client: the network of 64 bits for IPv6, and its label behind a loopback address."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ip_address(host)
    except ValueError:
        return str(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return f"{address}/{label}"
    return str(address) if address.version == 4 else str(ip_network((int(address), 64), strict=False))


CLIENT = "clotho.client"
"""Key of the `Client` in the scope of a request."""


class ClientMiddleware:
    """Identifies the client of every request. With API keys, every path requires one, except those of `is_open`.

    A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`, and may be followed by `:LABEL`.
    """

    def __init__(self, app: ASGIApp, *, clients: Clients) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or respond with 401."""
        client = None if scope["type"] == "lifespan" else self._clients.find(scope)
        if client is None and scope["type"] != "lifespan" and not is_open(scope["path"]):
            headers = {"www-authenticate": "Bearer"}
            message = "A valid API key is required; send the header `Authorization: Bearer KEY`."
            error = ApiError(401, message, code="invalid_api_key", headers=headers)
            await error.response()(scope, receive, send)
        else:
            await self._app({**scope, CLIENT: client}, receive, send)


def is_open(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in OPEN_ROUTES or path.startswith(OPEN_FILES)


def client_of(scope: Scope) -> Client:
    """Return the client of a request that has passed `ClientMiddleware`."""
    client = scope[CLIENT]
    assert isinstance(client, Client)
    return client


def for_admins(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that responds with status 403 to clients that are no administrators, before it reads a body."""

    async def guarded(http: Request) -> Response:
        if not client_of(http.scope).is_admin:
            message = "This route controls the server: set admin = true for the key in server.api_keys_file."
            raise ApiError(403, message, code="admin_required")
        return await handler(http)

    return guarded
