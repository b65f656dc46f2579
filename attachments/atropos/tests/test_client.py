"""The size of a response body is limited after decompression."""

from __future__ import annotations

import gzip
import threading
import tracemalloc
from collections.abc import AsyncIterator

import httpx
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from attachments.atropos import client
from attachments.atropos.client import BodyBroken, BodyTooLarge, read_bounded

MEGABYTE = 2**20


def response_of(*chunks: bytes, encoding: str | None = None) -> httpx.Response:
    """Return a response that arrives in these chunks."""

    async def content() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return httpx.Response(200, content=content(), headers={"content-encoding": encoding} if encoding else None)


@pytest.mark.parametrize("size", [0, 1, 999, 1000])
async def test_a_body_up_to_the_limit_is_read(size: int) -> None:
    """With and without compression, in one chunk or many."""
    content = b"x" * size
    packed = gzip.compress(content)
    assert await read_bounded(response_of(content), 1000) == content
    assert await read_bounded(response_of(*(bytes([byte]) for byte in content)), 1000) == content
    assert await read_bounded(response_of(packed, encoding="gzip"), 1000) == content
    assert await read_bounded(response_of(*(bytes([byte]) for byte in packed), encoding="gzip"), 1000) == content


async def test_one_byte_more_is_too_large() -> None:
    """With and without compression."""
    for response in (response_of(b"x" * 1001), response_of(gzip.compress(b"x" * 1001), encoding="gzip")):
        with pytest.raises(BodyTooLarge):
            await read_bounded(response, 1000)


async def test_a_body_above_the_limit_is_not_decompressed() -> None:
    """A small body that decompresses to 64 MB does not use that memory."""
    packed = gzip.compress(b"\0" * 64 * MEGABYTE, compresslevel=1)
    assert len(packed) < MEGABYTE
    tracemalloc.start()
    with pytest.raises(BodyTooLarge):
        await read_bounded(response_of(packed, encoding="gzip"), MEGABYTE)
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
async def test_a_malformed_body_is_an_error(content: bytes, encoding: str) -> None:
    """Truncated bodies and unexpected encodings."""
    with pytest.raises(BodyBroken):
        await read_bounded(response_of(content, encoding=encoding), 1000)


async def test_a_batch_that_is_being_parsed_delays_neither_a_stop_nor_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing runs in a daemon thread, which is abandoned when the client is cancelled."""
    begun, gate, daemons = threading.Event(), threading.Event(), list[bool]()

    def parse(*_: object) -> None:
        daemons.append(threading.current_thread().daemon)
        begun.set()
        assert gate.wait(30)
        daemons.clear()

    monkeypatch.setattr(client, "_decoded", parse)
    server = httpx.MockTransport(lambda _: response_of(b"{}"))
    api = client.ApiClient("http://127.0.0.1:1", server)
    async with create_task_group() as tasks:
        tasks.start_soon(api.batch)
        while not begun.is_set():
            await checkpoint()
        tasks.cancel_scope.cancel()
    assert daemons == [True]
    gate.set()
    await api.close()
