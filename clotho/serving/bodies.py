"""Bodies of requests: media type, size, time, rate and memory, strict decoding of a JSON object. Bodies of responses.

Those of requests are read before the request is admitted. Decoding takes time and memory linear in the size of a body.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, NoReturn

import anyio
import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope

from clotho.serving.errors import ApiError, overloaded

MAX_INCOMPLETE = 1024
"""Bodies that may be incomplete at once."""

MAX_TOTAL_BYTES = 268_435_456
"""Memory of all bodies, of the requests that are served and of those that wait."""

FREE_BYTES = 65_536
"""The first bytes of a body, which do not count towards the rate."""

BYTES_PER_SECOND, BURST_BYTES = 1_048_576, 8_388_608
"""Rate at which the server reads the rest of all bodies. The work for a body is linear in its size, so the rate also
limits the share of the processor that large bodies can take. 1 MiB is the text of about 250,000 tokens."""


VERSION_HEADER = "x-clotho-weights-version"


def json_response(
    body: Struct | list[Struct], version: int, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a body as JSON. version: of the weights, for a header. headers: others."""
    headers = {VERSION_HEADER: str(version), **(headers or {})}
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")


class ByteRate:
    """A token bucket: at most `burst` bytes at once, and `per_second` bytes per second in the long run."""

    def __init__(self, per_second: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._level, self._at = burst, clock()

    def take(self, count: int) -> float:
        """Take `count` bytes, and return the seconds that the caller has to wait."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second) - count
        self._at = now
        return max(0.0, -self._level / self._per_second)


class _Body:
    """One body. scope: cancelled if the body gives way to others."""

    def __init__(self) -> None:
        self.size = 0
        self.scope = anyio.CancelScope()


class RequestBodies:
    """Reads the bodies of all requests.

    If too many bodies are incomplete, or all bodies together are too large, the oldest incomplete body gives way: its
    request ends with status 503. A stalled body therefore never displaces a body that arrives at once.
    """

    def __init__(self, *, max_bytes: int, seconds: float) -> None:
        """max_bytes, seconds: limits on the size of one body and on the time in which it must arrive."""
        self.seconds = seconds
        self._max_bytes = max_bytes
        self._incomplete: dict[_Body, None] = {}
        self._rate = ByteRate(BYTES_PER_SECOND, BURST_BYTES)
        self._total = 0

    @asynccontextmanager
    async def read(self, scope: Scope, receive: Receive, *, binary: str = "") -> AsyncIterator[bytes]:
        """Yield the whole body. Its bytes count towards the memory of all bodies until the block ends.

        binary: another media type that is accepted. Raises ApiError with status 415 for another media type than JSON,
        413 if the body is too large, 408 if it has not arrived in time, and 503 if it gave way to other bodies. Raises
        ClientDisconnect if the client disconnects.
        """
        headers = Headers(scope=scope)
        if not binary or headers.get("content-type", "") != binary:
            require_json(headers)
        if declares_more(headers, self._max_bytes):
            raise self._too_large()
        body = _Body()
        try:
            yield await self._collect(body, receive)
        finally:
            self._total -= body.size

    def _too_large(self) -> ApiError:
        message = f"The request body is larger than the limit of {self._max_bytes} bytes."
        return ApiError(413, message, code="body_too_large")

    async def _collect(self, body: _Body, receive: Receive) -> bytes:
        if len(self._incomplete) >= MAX_INCOMPLETE:
            self._evict_oldest()
        self._incomplete[body] = None
        try:
            with body.scope, anyio.move_on_after(self.seconds):
                return await self._read_all(body, receive)
        finally:
            self._incomplete.pop(body, None)
        if body.scope.cancelled_caught:
            raise overloaded("The server received other request bodies first; retry later.")
        message = f"The request body did not arrive within {self.seconds:g} seconds."
        raise ApiError(408, message, code="body_timeout")

    async def _read_all(self, body: _Body, receive: Receive) -> bytes:
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            chunks.append(chunk)
            body.size += len(chunk)
            self._total += len(chunk)
            if body.size > self._max_bytes:
                raise self._too_large()
            if self._total > MAX_TOTAL_BYTES:
                self._evict_oldest()
            if body.size > FREE_BYTES:
                await anyio.sleep(self._rate.take(len(chunk)))
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _evict_oldest(self) -> None:
        if self._incomplete:
            oldest = next(iter(self._incomplete))
            del self._incomplete[oldest]
            self._total -= oldest.size
            oldest.size = 0
            oldest.scope.cancel()


def declares_more(headers: Headers, max_bytes: int) -> bool:
    """Return whether the declared length of a body is above the limit."""
    declared = headers.get("content-length", "")
    return declared.isdecimal() and (len(declared) > 18 or int(declared) > max_bytes)


def require_json(headers: Headers) -> None:
    """Raise ApiError with status 415 unless the body is declared as uncompressed JSON in UTF-8."""
    declared = headers.getlist("content-type")
    media_type, *parameters = (part.strip().lower() for part in ",".join(declared).split(";"))
    charsets = [part.removeprefix("charset=").strip('"') for part in parameters if part.startswith("charset=")]
    encoding = headers.get("content-encoding", "identity").lower()
    if media_type != "application/json" or any(charset not in ("utf-8", "utf8") for charset in charsets):
        message = "The body must be JSON in UTF-8; send the header `Content-Type: application/json`."
    elif encoding != "identity":
        message = "Compressed bodies are not supported; send no Content-Encoding header."
    else:
        return
    raise ApiError(415, message, code="unsupported_media_type")


MAX_ELEMENTS = 65_536
"""Maximum number of fields, objects and lists of a body together; list items that are numbers or strings do not count.
The largest valid request, 2,048 messages with a part each, has about 15,000."""

STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"(\s*+:)?)?+|([\[{])', re.DOTALL)
"""A string, with a group if it is the name of a field, or the beginning of an object or a list. Never backtracks."""

SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def json_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises ApiError with status 400 for everything else, and for too many elements."""
    _require_bounded(body)
    try:
        value = DECODER.decode(body.decode())
        if SURROGATE.search(body):
            msgspec.json.decode(body)  # refuses unpaired surrogates, which are no text
    except RecursionError as error:
        raise ApiError(400, "The request body is nested too deeply.") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ApiError(400, f"The request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, "The request body must be a JSON object.")
    return value


def _require_bounded(body: bytes) -> None:
    if body.count(b":") + body.count(b"[") + body.count(b"{") <= MAX_ELEMENTS:
        return  # an upper bound, which includes the characters of strings
    elements = (True for match in STRUCTURE.finditer(body) if match.lastindex)
    if next(islice(elements, MAX_ELEMENTS, None), False):
        raise ApiError(400, f"The request body has more than {MAX_ELEMENTS} fields, objects and lists.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        duplicate = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ApiError(400, f"The request body contains the field {duplicate[:64]!r} twice.", param=duplicate)
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is out of range")
    return number


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_not_a_number)
