"""Bodies of HTTP answers, within a bound, however small they were packed."""

from __future__ import annotations

import zlib

import httpx

GZIP = 31  # window bits: gzip's own framing


class BodyTooLarge(Exception):
    """More than was wanted of it."""


class BodyBroken(Exception):
    """It cannot be unpacked, or it broke off."""


async def read_bounded(response: httpx.Response, most: int) -> bytes:
    """Read the body of a streamed answer, plain or gzip, of at most so many bytes once unpacked.

    Raises BodyTooLarge as soon as there are more, BodyBroken, and what httpx raises.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise BodyBroken("it is packed in a way that was not asked for")
    unpacker = zlib.decompressobj(GZIP) if encoding == "gzip" else None
    parts, size = [], 0
    async for chunk in response.aiter_raw():
        part = _unpack(unpacker, chunk, most + 1 - size) if unpacker else chunk
        size += len(part)
        if size > most:
            raise BodyTooLarge
        parts.append(part)
    if unpacker and not unpacker.eof:
        raise BodyBroken("it broke off")
    return b"".join(parts)


def _unpack(unpacker: zlib._Decompress, chunk: bytes, most: int) -> bytes:
    try:
        return unpacker.decompress(chunk, most)
    except zlib.error as error:
        raise BodyBroken(f"it cannot be unpacked: {error}") from error
