"""Limits of the server: request bodies, concurrency, disconnects, engine failures and shutdown."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import anyio
import httpx
import pytest
from anyio.abc import SocketAttribute, SocketStream
from structlog.testing import capture_logs

from clotho.serving import limits, openai_routes, server
from tests.serving.raw_connections import connect, head, read_all
from tests.serving.running_server import Served, serving

SMALL = 100_000
SMALL_BUFFER = 4096


async def chunks(count: int, size: int) -> AsyncIterator[bytes]:
    """Yield a body without a Content-Length."""
    for _ in range(count):
        yield b"x" * size


async def test_a_body_above_the_limit_is_rejected_with_and_without_content_length() -> None:
    """Status 413."""
    async with serving(max_body_bytes=SMALL) as served:
        declared = await served.http.post("/v1/completions", content=b"x" * (SMALL + 1))
        counted = await served.http.post("/v1/completions", content=chunks(3, SMALL // 2))
        for answer in (declared, counted):
            assert answer.status_code == 413
            assert str(SMALL) in answer.json()["error"]["message"]
        assert (await served.post("/v1/completions", prompt="good")).status_code == 200


async def test_a_large_content_length_is_rejected_before_the_body_arrives() -> None:
    """The client sends no body."""
    async with serving(max_body_bytes=SMALL) as served, await connect(served) as stream:
        await stream.send(head("Content-Length: 100000000000"))
        with anyio.fail_after(5):
            assert b" 413 " in await stream.receive()


async def test_a_slow_body_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit applies to the whole body."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.05)
    async with serving(body_seconds=0.2) as served, await connect(served) as stream:
        await stream.send(head("Content-Length: 1000") + b"{")
        answer = await read_all(stream)
        assert b" 408 " in answer
        assert b"body_timeout" in answer
        assert (await served.post("/v1/completions", prompt="good")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere", "/health"])
async def test_an_early_response_reaches_a_client_that_is_sending(path: str) -> None:
    """Status 401 or 405 during a large body."""
    async with serving(api_key="secret") as served:
        answer = await served.http.post(path, content=b"x" * 3_000_000)
        assert answer.status_code == (405 if path == "/health" else 401)


async def test_many_small_chunks_do_not_block_an_early_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypercorn queues at most ten chunks that the application does not read."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.05)
    async with serving(api_key="secret") as served, await connect(served) as stream:
        await stream.send(head("Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5000)
        assert b" 401 " in await read_all(stream)


async def test_a_client_that_never_stops_sending_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection closes LINGER_SECONDS after the response."""
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    async with serving(max_body_bytes=1000) as served, await connect(served) as stream:
        await stream.send(head("Transfer-Encoding: chunked"))
        with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await send_forever(stream)


async def send_forever(stream: SocketStream) -> None:
    """Send until the connection closes."""
    while True:
        await stream.send(b"1\r\nx\r\n" * 5000)


async def test_a_disconnect_during_the_body_frees_the_slot() -> None:
    """The next request is admitted."""
    async with serving(max_concurrent=1) as served:
        async with await connect(served) as stream:
            await stream.send(head("Content-Length: 1000") + b"{")
        with anyio.fail_after(5):
            while (await served.post("/v1/completions", prompt="good")).status_code == 503:
                await anyio.lowlevel.checkpoint()


async def test_idle_connections_do_not_block_requests() -> None:
    """200 connections without a request."""
    async with serving() as served:
        idle = [await connect(served) for _ in range(200)]
        try:
            assert (await served.post("/v1/completions", prompt="good")).status_code == 200
        finally:
            for stream in idle:
                await stream.aclose()


async def stream_unread(served: Served, stack: AsyncExitStack) -> SocketStream:
    """Request a stream with small buffers of the sockets, and do not read it."""
    body = b'{"prompt": "x", "stream": true, "n": 8, "max_tokens": 400, "ignore_eos": true}'
    stream = await stack.enter_async_context(await connect(served))
    stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    await stream.send(head(f"Content-Length: {len(body)}") + body)
    return stream


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[server.ClientWriter]:
    """Return the clients that have connected; their sockets have small buffers."""
    connected: list[server.ClientWriter] = []

    class KnownWriter(server.ClientWriter):
        def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            super().__init__(reader, writer)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER)
            connected.append(self)

    monkeypatch.setattr(server, "ClientWriter", KnownWriter)
    return connected


async def test_a_client_that_does_not_read_is_disconnected(clients: list[server.ClientWriter]) -> None:
    """After `server.send_seconds`. The engine aborts the request, and the data that wait for the client are dropped."""
    async with serving(send_seconds=0.2) as served, AsyncExitStack() as stack:
        stream = await stream_unread(served, stack)
        await served.engine.wait_until(lambda: served.engine.running == 8)
        (client,) = clients
        with anyio.fail_after(10):
            while served.engine.running or served.sampler.running:
                await anyio.lowlevel.checkpoint()
            while not client.transport.is_closing() or client.transport.get_write_buffer_size():
                await anyio.lowlevel.checkpoint()
        assert not (await read_all(stream)).endswith(b"0\r\n\r\n")


async def test_the_server_ends_although_a_client_does_not_read(
    clients: list[server.ClientWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that wait for clients are dropped END_SECONDS after the requests have ended."""
    monkeypatch.setattr(server, "END_SECONDS", 0.05)
    async with AsyncExitStack() as stack:
        with anyio.fail_after(20):
            async with serving(shutdown_seconds=0.1) as served:
                await stream_unread(served, stack)
                await served.engine.wait_until(lambda: served.engine.running == 8)
                while not clients[0].transport.get_write_buffer_size():
                    await anyio.lowlevel.checkpoint()


async def test_the_bytes_that_wait_for_slow_clients_are_bounded(
    clients: list[server.ClientWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four clients do not read. Each stream has at most one write that its client has not accepted."""
    write, writes, waiting = server.ClientWriter.write, list[int](), dict[server.ClientWriter, int]()

    def recorded(self: server.ClientWriter, data: bytes | bytearray | memoryview) -> None:
        write(self, data)
        writes.append(len(data))
        waiting[self] = max(waiting.get(self, 0), self.transport.get_write_buffer_size())

    monkeypatch.setattr(server.ClientWriter, "write", recorded)
    async with serving(send_seconds=600.0) as served, AsyncExitStack() as stack:
        served.engine.allow(0)
        for _ in range(4):
            await stream_unread(served, stack)
        await served.engine.wait_until(lambda: served.engine.running == 32)
        served.engine.allow(100)
        await served.engine.wait_until(lambda: served.engine._allowed == 0)
        with anyio.fail_after(10):
            while len(waiting) < 4 or min(waiting.values()) <= server.BUFFER_BYTES:
                await anyio.lowlevel.checkpoint()
        assert len(clients) == 4
        assert max(writes) < server.BUFFER_BYTES
        assert max(waiting.values()) <= server.BUFFER_BYTES + max(writes)
        served.engine.allow(10**6)


LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


async def begin_stream(served: Served, **more: object) -> httpx.Response:
    """Open a stream and wait for the head of the response."""
    request = served.http.build_request("POST", "/v1/completions", json=LONG | {"stream": True} | more)
    return await served.http.send(request, stream=True)


async def wait_for_queue(served: Served, count: int) -> None:
    """Wait until `count` requests are queued."""
    with anyio.fail_after(10):
        while served.server.limit.queued != count:
            await anyio.lowlevel.checkpoint()


async def test_a_disconnect_during_a_stream_aborts_the_request() -> None:
    """The engine aborts all completions."""
    async with serving() as served:
        served.engine.allow(3)
        answer = await begin_stream(served, n=4)
        assert served.engine.running == 4
        await answer.aclose()
        await served.engine.wait_until(lambda: served.engine.running == 0)
        assert served.engine.aborted == [1]


async def test_a_disconnect_before_the_response_aborts_the_request() -> None:
    """With and without streaming."""
    async with serving() as served:
        served.engine.allow(0)
        for stream in (False, True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda body: served.http.post("/v1/completions", json=body), LONG | {"stream": stream})
                await served.engine.wait_until(lambda: served.engine.running == 1)
                tasks.cancel_scope.cancel()
            await served.engine.wait_until(lambda: served.engine.running == 0)
        assert served.engine.aborted == [1, 2]


async def test_requests_above_the_limit_wait_in_a_queue() -> None:
    """First in, first out. /health is not limited."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        finished: list[str] = []

        async def post(prompt: str) -> None:
            reply = await served.post("/v1/completions", prompt=prompt, max_tokens=1)
            assert reply.status_code == 200
            finished.append(prompt)

        async with anyio.create_task_group() as tasks:
            for number, prompt in enumerate("abc"):
                tasks.start_soon(post, prompt)
                await wait_for_queue(served, number + 1)
            assert (await served.http.get("/health")).status_code == 200
            assert (len(served.engine.requests), served.requests) == (1, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert finished == ["a", "b", "c"]
        encode = served.engine.tokenizer.encode
        assert [asked.prompt for asked in served.engine.requests] == [encode(prompt) for prompt in ("x", *"abc")]


async def test_a_disconnect_removes_a_request_from_the_queue() -> None:
    """The engine never receives the request."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        behind: list[httpx.Response] = []

        async def stay() -> None:
            behind.append(await served.post("/v1/completions", prompt="b", max_tokens=1))

        async with anyio.create_task_group() as stays:
            async with anyio.create_task_group() as leaves:
                leaves.start_soon(lambda: served.post("/v1/completions", prompt="a"))
                await wait_for_queue(served, 1)
                stays.start_soon(stay)
                await wait_for_queue(served, 2)
                leaves.cancel_scope.cancel()
            await wait_for_queue(served, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert behind[0].status_code == 200
        assert len(served.engine.requests) == 2


async def test_a_body_larger_than_the_buffer_arrives_complete() -> None:
    """The buffered part is delivered first."""
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        replies: list[httpx.Response] = []

        async def post() -> None:
            replies.append(await served.post("/v1/completions", prompt="b", max_tokens=1, user="u" * 1_000_000))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await wait_for_queue(served, 1)
            served.engine.allow(10**6)
            await answer.aread()
        assert replies[0].status_code == 200


async def test_a_full_queue_is_a_503_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests succeed again when a slot is free."""
    monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 0)
    async with serving(max_concurrent=1) as served:
        served.engine.allow(2)
        answer = await begin_stream(served)
        busy = await served.post("/v1/completions", prompt="x")
        assert busy.status_code == 503
        assert busy.headers["retry-after"] == "1"
        assert busy.json()["error"]["code"] == "overloaded"
        assert (await served.http.get("/health")).status_code == 200
        served.engine.allow(10**6)
        await answer.aread()
        assert (await served.post("/v1/completions", prompt="x")).status_code == 200


async def test_a_shutdown_rejects_queued_requests_immediately() -> None:
    """Running requests keep their grace period."""
    async with serving(shutdown_seconds=10.0, max_concurrent=1) as served:
        served.engine.allow(3)
        answer = await begin_stream(served)
        replies: list[httpx.Response] = []

        async def post() -> None:
            replies.append(await served.post("/v1/completions", prompt="b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await wait_for_queue(served, 1)
            served.stop()
        assert replies[0].status_code == 503
        assert replies[0].json()["error"]["code"] == "shutting_down"
        assert served.engine.running == 1
        served.engine.allow(10**6)
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_a_shutdown_waits_for_nothing_if_no_request_runs() -> None:
    """The grace period is for running requests only."""
    limit, has_ended = limits.ConcurrencyLimit(1), anyio.Event()

    async def drain() -> None:
        await limit.drain(math.inf)
        has_ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        assert has_ended.is_set()


async def test_an_unexpected_exception_is_a_500_without_details(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event log contains the exception; the client receives no details, with and without streaming."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("secret detail")

    async with serving() as served:
        monkeypatch.setattr(openai_routes, "completion_logprobs", broken)
        with capture_logs() as logged:
            whole = await served.post("/v1/completions", prompt="x", logprobs=1)
            streamed = await served.post("/v1/completions", prompt="x", logprobs=1, stream=True)
        monkeypatch.undo()
        assert (whole.status_code, streamed.status_code) == (500, 200)
        assert whole.json()["error"]["code"] == "internal_error"
        for answer in (whole, streamed):
            assert "internal_error" in answer.text
            assert "secret" not in answer.text
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await served.post("/v1/completions", prompt="x", logprobs=1)).status_code == 200
    assert [str(entry["exc_info"]) for entry in logged] == ["secret detail"] * 2


async def test_requests_are_cancelled_after_the_grace_period() -> None:
    """A stream ends with an error and [DONE], another request with status 503."""
    outcome: dict[str, str] = {}
    async with serving(shutdown_seconds=0.1) as served:
        served.engine.allow(3)
        answer = await begin_stream(served)

        async def wait() -> None:
            outcome["waiting"] = str((await served.post("/v1/completions", prompt="y")).status_code)

        async def read() -> None:
            outcome["stream"] = (await answer.aread()).decode()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(read)
            await served.engine.wait_until(lambda: served.engine.running == 2)
            served.stop()
        await served.engine.wait_until(lambda: served.engine.running == 0)
    assert outcome["waiting"] == "503"
    assert "shutting down" in outcome["stream"]
    assert outcome["stream"].endswith("data: [DONE]\n\n")
