"""Bodies of answers are bounded, by what they are once unpacked."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import pytest

from clotho.atropos.client import BodyBroken, BodyTooLarge, read_bounded

MEGABYTE = 2**20


def answer(*chunks: bytes, encoding: str | None = None) -> httpx.Response:
    """An answer that arrives in these pieces."""

    async def content() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return httpx.Response(200, content=content(), headers={"content-encoding": encoding} if encoding else None)


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
async def test_up_to_the_bound_everything_is_read(size: int) -> None:
    """Packed or not, in one piece or many."""
    content = b"x" * size
    packed = gzip.compress(content)
    assert await read_bounded(answer(content), 1000) == content
    assert await read_bounded(answer(*(bytes([byte]) for byte in content)), 1000) == content
    assert await read_bounded(answer(packed, encoding="gzip"), 1000) == content
    assert await read_bounded(answer(*(bytes([byte]) for byte in packed), encoding="gzip"), 1000) == content


async def test_one_byte_more_is_too_large() -> None:
    """Packed or not."""
    for response in (answer(b"x" * 1001), answer(gzip.compress(b"x" * 1001), encoding="gzip")):
        with pytest.raises(BodyTooLarge):
            await read_bounded(response, 1000)


async def test_what_unpacks_to_more_than_is_wanted_is_never_unpacked() -> None:
    """A little that would be 64 megabytes takes the bound's memory, not its own."""
    packed = gzip.compress(b"\0" * 64 * MEGABYTE, compresslevel=1)
    assert len(packed) < MEGABYTE
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        await read_bounded(answer(packed, encoding="gzip"), MEGABYTE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MEGABYTE


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        (gzip.compress(b"x" * 100, mtime=0)[:-9], "gzip"),
        (gzip.compress(b"x" * 100, mtime=0)[:-1], "gzip"),
        (b"", "gzip"),
        (b"plain", "gzip"),
        (b"x", "br"),
        (gzip.compress(gzip.compress(b"x", mtime=0), mtime=0), "gzip, gzip"),
    ],
)
async def test_what_cannot_be_unpacked_is_broken(content: bytes, encoding: str) -> None:
    """Also where only its end is missing, and where it is packed in a way nobody asked for."""
    with pytest.raises(BodyBroken):
        await read_bounded(answer(content, encoding=encoding), 1000)
