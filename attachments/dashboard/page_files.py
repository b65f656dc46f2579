"""The page of the dashboard: static files, with headers that restrict what a browser executes.

The chart library is stored compressed, as browsers receive it.

The files contain no secrets, so that browsers load them without an API key. The page sends the key with its requests
for data.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import lru_cache, partial
from pathlib import Path

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from clotho.serving.errors import EXCEPTION_HANDLERS, ApiError

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
STATIC = "/dashboard/static/"
"""The path of all files but the page itself. `clotho.serving.auth` opens it."""

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
"""The media type of a file by the end of its name. Other files are not served."""

STORED_COMPRESSED = ".gz"
"""End of the name of a file that is stored compressed. Clients and callers use the name without it."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
"""An `Accept-Encoding` that accepts gzip."""


def page_names() -> frozenset[str]:
    """Return the names of the files of the page, relative to its directory."""
    paths = (path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
    names = (path.removesuffix(STORED_COMPRESSED) for path in paths)
    return frozenset(name for name in names if Path(name).suffix in TYPES)


def page_text(name: str) -> str:
    """Return the text of a file of the page. Raises OSError."""
    return _contents(name, compressed=False).decode()


def page_routes() -> list[Route]:
    """Return the routes of the page and its files."""
    names = page_names()

    async def page(http: Request) -> Response:
        return await _file(http, INDEX)

    async def static(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in names:
            raise ApiError(404, "The dashboard has no file of this name.")
        return await _file(http, name)

    return [Route("/", page), Route(STATIC + "{name:path}", static)]


def page_app() -> Starlette:
    """Return an application that has the page and its files only."""
    return Starlette(routes=page_routes(), exception_handlers=EXCEPTION_HANDLERS)


async def _file(http: Request, name: str) -> Response:
    """Return a file, compressed if the client accepts gzip, or status 304 if the client has it."""
    compressed = bool(GZIP.search(http.headers.get("accept-encoding", "")))
    data = await to_thread.run_sync(partial(_contents, name, compressed=compressed))
    headers = HEADERS | {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if compressed else {})
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers["etag"] = tag
    known = {one.strip().removeprefix("W/") for one in http.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=TYPES[Path(name).suffix])


def _contents(name: str, *, compressed: bool) -> bytes:
    path = PAGE / name
    if path.exists():
        data = path.read_bytes()
        return _gzip(data) if compressed else data
    data = path.with_name(path.name + STORED_COMPRESSED).read_bytes()
    return data if compressed else gzip.decompress(data)


@lru_cache(maxsize=64)
def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)
