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
from starlette.requests import Request
from starlette.responses import Response

from clotho.serving.errors import ApiError

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
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


class PageFiles:
    """Answers requests for the page and its files."""

    def __init__(self) -> None:
        self._names = page_names()

    async def page(self, http: Request) -> Response:
        """Serve GET /."""
        return await _file(http, INDEX)

    async def static(self, http: Request) -> Response:
        """Serve the other files. Raises ApiError with status 404 for a name of none."""
        name = http.path_params["name"]
        if name not in self._names:
            raise ApiError(404, "The dashboard has no file of this name.")
        return await _file(http, name)


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
