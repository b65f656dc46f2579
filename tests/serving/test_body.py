"""Bodies: bounded in size and time, and connections that end well although the body was not read."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from anyio.abc import SocketStream

from clotho.serving import limits
from tests.serving.running_server import Served, serving

SMALL = 100_000


async def connect(served: Served) -> SocketStream:
    """A bare connection."""
    host, port = served.url.removeprefix("http://").split(":")
    return await anyio.connect_tcp(host, int(port))


async def read_all(stream: SocketStream) -> bytes:
    """Everything until the server closes."""
    received = b""
    with anyio.fail_after(10):
        try:
            while True:
                received += await stream.receive()
        except anyio.EndOfStream:
            return received


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    """The head of a POST."""
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


async def chunks(count: int, size: int) -> AsyncIterator[bytes]:
    """A body of unknown length."""
    for _ in range(count):
        yield b"x" * size


async def test_a_body_beyond_the_limit_is_refused_whether_or_not_it_says_so() -> None:
    """413 by Content-Length before a byte is read, and by counting where there is none."""
    async with serving(max_body_bytes=SMALL) as served:
        declared = await served.http.post("/v1/completions", content=b"x" * (SMALL + 1))
        counted = await served.http.post("/v1/completions", content=chunks(3, SMALL // 2))
        for answer in (declared, counted):
            assert answer.status_code == 413
            assert str(SMALL) in answer.json()["error"]["message"]
        assert (await served.post("/v1/completions", prompt="good")).status_code == 200


async def test_a_huge_declared_length_is_refused_at_once() -> None:
    """The answer comes before the body."""
    async with serving(max_body_bytes=SMALL) as served, await connect(served) as stream:
        await stream.send(head("Content-Length: 100000000000"))
        with anyio.fail_after(5):
            assert b" 413 " in await stream.receive()


async def test_a_body_that_drips_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """408 once the whole body's time is up, however steadily it comes."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.05)
    async with serving(body_seconds=0.2) as served, await connect(served) as stream:
        await stream.send(head("Content-Length: 1000") + b"{")
        answer = await read_all(stream)
        assert b" 408 " in answer
        assert b"body_timeout" in answer
        assert (await served.post("/v1/completions", prompt="good")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/health"])
async def test_an_early_answer_reaches_a_client_that_is_still_sending(path: str) -> None:
    """401, 404 and 405 to a large body: answered, and no connection is left hanging."""
    async with serving(api_key="secret") as served:
        answer = await served.http.post(path, content=b"x" * 3_000_000)
        assert answer.status_code == (405 if path == "/health" else 401)


async def test_many_small_chunks_do_not_hang_an_early_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than Hypercorn queues, to a route that never reads them: the answer comes, the connection ends."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.05)
    async with serving(api_key="secret") as served, await connect(served) as stream:
        await stream.send(head("Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5000)
        assert b" 401 " in await read_all(stream)


async def test_a_client_that_never_stops_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the answer the connection lingers for a moment only."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    async with serving(max_body_bytes=1000) as served, await connect(served) as stream:
        await stream.send(head("Transfer-Encoding: chunked"))
        with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await send_for_ever(stream)


async def send_for_ever(stream: SocketStream) -> None:
    """Until the other side has had enough."""
    while True:
        await stream.send(b"1\r\nx\r\n" * 5000)


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing() -> None:
    """Its place in the traffic is free again."""
    async with serving(max_concurrent=1) as served:
        async with await connect(served) as stream:
            await stream.send(head("Content-Length: 1000") + b"{")
        with anyio.fail_after(5):
            while (await served.post("/v1/completions", prompt="good")).status_code == 503:
                await anyio.lowlevel.checkpoint()


async def test_idle_connections_do_not_keep_others_out() -> None:
    """Many sockets that say nothing; a good client is answered."""
    async with serving() as served:
        idle = [await connect(served) for _ in range(200)]
        try:
            assert (await served.post("/v1/completions", prompt="good")).status_code == 200
        finally:
            for stream in idle:
                await stream.aclose()


async def test_a_client_that_does_not_read_loses_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream into a full socket ends its generation after the send deadline."""
    monkeypatch.setattr(limits, "SEND_SECONDS", 0.2)
    asked = b'{"prompt": "x", "stream": true, "n": 64, "max_tokens": 500, "ignore_eos": true, "logprobs": 20}'
    async with serving() as served, await connect(served) as stream:
        await stream.send(head(f"Content-Length: {len(asked)}") + asked)
        await served.engine.until(lambda: served.engine.running == 64)
        await served.engine.until(lambda: served.engine.running == 0)
        with anyio.fail_after(10):
            while served.sampler.running:
                await anyio.lowlevel.checkpoint()
