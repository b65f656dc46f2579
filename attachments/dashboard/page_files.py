"""The page of the dashboard: static files, with headers that restrict what a browser executes.

The files contain no secrets, so that browsers load them without an API key. The page sends the key with its requests
for data.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Mapping
from functools import partial
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

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
"""An `Accept-Encoding` that accepts gzip."""

MIN_BYTES, LEVEL = 1000, 3
"""Size from which a response is compressed, and how much time that may take: a third of gzip's default."""


def page_names() -> frozenset[str]:
    """Return the names of the files of the page, relative to its directory."""
    paths = (path.relative_to(PAGE) for path in PAGE.rglob("*") if path.is_file() and path.suffix in TYPES)
    return frozenset(path.as_posix() for path in paths)


def page_text(name: str) -> str:
    """Return the text of a file of the page. Raises OSError."""
    return (PAGE / name).read_text(encoding="utf-8")


async def compressed(http: Request, data: bytes, headers: Mapping[str, str], media_type: str) -> Response:
    """Return a response that is compressed, in a worker thread, if the client accepts gzip and it is worth the time."""
    headers = {**headers, "vary": "accept-encoding"}
    if len(data) >= MIN_BYTES and GZIP.search(http.headers.get("accept-encoding", "")):
        data = await to_thread.run_sync(partial(gzip.compress, data, LEVEL, mtime=0))
        headers["content-encoding"] = "gzip"
    return Response(data, headers=headers, media_type=media_type)


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
    """Return a file, or status 304 if the client has it."""
    data = await to_thread.run_sync((PAGE / name).read_bytes)
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = HEADERS | {"etag": tag}
    known = {one.strip().removeprefix("W/") for one in http.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers=headers)
    return await compressed(http, data, headers, TYPES[Path(name).suffix])
