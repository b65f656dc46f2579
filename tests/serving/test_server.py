"""Binding, restart, and output of the server."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket

import anyio
import httpx
import pytest

from clotho.lanes.sampling_client import EngineSampler
from clotho.serving.server import ApiServer, ClientWriter, base_url, listen, raise_open_files_limit
from clotho.settings.server import HttpServer
from protocols.errors import ServerError
from tests.fakes import FakeEngine
from tests.serving.running_server import Served, server_context, serving


def test_a_port_in_use_is_a_one_line_error() -> None:
    """The error contains the port; the exit status is 2."""
    with listen(HttpServer(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} on 127.0.0.1 is already in use") as caught:
            listen(HttpServer(port=port))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_a_host_that_is_not_loopback_requires_an_api_key(host: str) -> None:
    """The check runs before the name is resolved."""
    with pytest.raises(ServerError, match=r"server\.api_key"):
        listen(HttpServer(host=host, port=0))


def test_any_address_can_be_bound_with_an_api_key() -> None:
    """0.0.0.0 with a key."""
    with listen(HttpServer(host="0.0.0.0", port=0, api_key="secret")) as bound:
        assert bound.getsockname()[0] == "0.0.0.0"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_cannot_be_bound_is_a_one_line_error(host: str) -> None:
    """An unknown name and an address of another machine."""
    with pytest.raises(ServerError, match="cannot listen on") as caught:
        listen(HttpServer(host=host, port=0, api_key="secret"))
    assert "\n" not in str(caught.value)


def test_the_base_url_contains_the_bound_address() -> None:
    """localhost binds 127.0.0.1."""
    with listen(HttpServer(host="localhost", port=0)) as bound:
        assert base_url(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_a_connection_sends_its_responses_without_delay() -> None:
    """Otherwise the body of a response waits until the client has acknowledged the headers: 40 ms on Linux."""
    with listen(HttpServer(port=0)) as bound, socket.create_connection(bound.getsockname()):
        connection, _ = bound.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_the_server_prints_and_logs_nothing(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """No banner, no access log, no Server header."""
    caplog.set_level(logging.DEBUG, logger="hypercorn")
    async with serving() as served:
        answer = await served.http.get("/health")
        assert "server" not in answer.headers
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert not [record for record in caplog.records if record.name.startswith("hypercorn")]


async def test_what_a_server_knows_of_its_clients_outlasts_a_restart() -> None:
    """Attachments keep their state in the parts of the server, which are made once: counters, and a pause."""
    engine = FakeEngine()
    served = Served(engine, EngineSampler(engine.submit_call, engine))
    server = ApiServer(server_context(served))
    for number in (1, 2):
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(server.run)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/is_paused")).json() == {"is_paused": number == 2}
                await client.post("/resume")
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
                assert (
                    f'vllm:prompt_tokens_total{{model_name="policy"}} {number}.0' in (await client.get("/metrics")).text
                )
                await client.post("/pause")
            tasks.cancel_scope.cancel()
    engine.close()


async def test_the_port_is_free_after_the_server_has_stopped() -> None:
    """Another run can use it."""
    async with serving() as served:
        port = int(served.url.rsplit(":", 1)[1])
    listen(HttpServer(port=port)).close()


async def test_a_restarted_server_responds_again() -> None:
    """The first start uses a given socket; the supervisor may restart the server."""
    engine = FakeEngine()
    served = Served(engine, EngineSampler(engine.submit_call, engine))
    listener = listen(HttpServer(port=0))
    port = listener.getsockname()[1]
    server = ApiServer(server_context(served, port=port), listener=listener)
    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            url = await tasks.start(server.run)
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            tasks.cancel_scope.cancel()
        assert url == f"http://127.0.0.1:{port}"
    engine.close()


def test_a_low_limit_of_open_files_is_raised() -> None:
    """Some systems start with a limit of 256. The limit is never lowered."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_open_files_limit(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
        raise_open_files_limit(280)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class FakeTransport(asyncio.WriteTransport):
    """A transport whose buffer the test sets."""

    waiting, aborted = 0, False
    protocol: asyncio.BaseProtocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Keep the protocol."""
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the protocol."""
        return self.protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing."""

    def get_write_buffer_size(self) -> int:
        """Return what the test set."""
        return self.waiting

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keep the data."""
        self.waiting += len(data)

    def abort(self) -> None:
        """Note the call."""
        self.aborted = True

    def is_closing(self) -> bool:
        """Return True, so that nobody closes it."""
        return True


async def test_a_client_that_accepts_any_data_in_time_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time counts from the last byte that was accepted, or from the first write that waits."""
    transport, now = FakeTransport(), 100.0
    reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    transport.set_protocol(asyncio.StreamReaderProtocol(reader))
    client = ClientWriter(reader, asyncio.StreamWriter(transport, transport.get_protocol(), reader, loop))
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    now = 1000.0
    client.disconnect_if_idle(30.0)  # nothing waits
    client.write(b"x" * 1000)
    for accepted in (1, 1, 998, 0):
        now += 29.0
        transport.waiting -= accepted
        client.disconnect_if_idle(30.0)
    assert not transport.aborted
    client.write(b"y")
    now += 29.0
    client.write(b"z")
    client.disconnect_if_idle(30.0)
    assert not transport.aborted
    now += 1.0
    client.disconnect_if_idle(30.0)
    assert transport.aborted
