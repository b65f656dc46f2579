"""The client of a remote inference server refuses every response that cannot be correct."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from attachments.remote.server import RemoteFailure, RemoteServer, server_address
from attachments.remote.tests.inference_server import group, servers
from attachments.remote.weights import Weights
from protocols.errors import ProfileError, RequestError
from protocols.sampling import Sampling
from protocols.step import WeightsReady

COMPLETION: dict[str, Any] = {
    "tokens": [3, 4], "logprobs": [-0.5, -1.5], "versions": [0, 0], "text": "ab", "finish_reason": "length",
}  # fmt: skip


def answering(content: bytes | Callable[[httpx.Request], httpx.Response], status: int = 200) -> RemoteServer:
    """Return a client of a server that always gives the same response."""
    respond = content if callable(content) else lambda _: httpx.Response(status, stream=httpx.ByteStream(content))
    return RemoteServer("http://server", transport=httpx.MockTransport(respond))


def answer(*completions: dict[str, Any], **changes: Any) -> bytes:
    """Return the body of a response with these completions."""
    return msgspec.json.encode({"completions": list(completions), "fingerprints": {"0": "f"}} | changes)


async def test_a_group_has_one_completion_per_seed_with_versions_and_fingerprints(tmp_path: Path) -> None:
    """The completions equal those of the engine, because seeds determine them."""
    with servers(tmp_path, 1) as [server]:
        found = await server.client().sample(group(3, rows=3))
        assert [len(completion.tokens) for completion in found.completions] == [6, 6, 6]
        assert found.fingerprints == {0: server.policy.fingerprint}
        assert found == await server.client().sample(group(3, rows=3))


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"{}",
        answer(COMPLETION, COMPLETION | {"logprobs": [-0.5, None]}),
        answer(COMPLETION, COMPLETION | {"logprobs": [-0.5]}),
        b"x" * 3_000_000,
    ],
    ids=["text", "no fields", "null", "fewer log-probabilities", "too large"],
)
async def test_a_malformed_response_is_a_failure_of_the_server(body: bytes) -> None:
    """No part of such a response is used."""
    with pytest.raises(RemoteFailure):
        await answering(body).sample(group(rows=2))


async def test_a_valid_response_of_the_same_form_is_accepted() -> None:
    """The wrong responses differ from this one in one place."""
    found = await answering(answer(COMPLETION, COMPLETION)).sample(group(rows=2))
    assert [completion.tokens for completion in found.completions] == [(3, 4), (3, 4)]


@pytest.mark.parametrize(
    "endless", [b"HTTP/1.1 100 Continue\r\n\r\n", b"x-header: 1\r\n"], ids=["interim responses", "headers"]
)
async def test_a_response_without_end_is_a_failure_of_the_server(endless: bytes) -> None:
    """The time limit is that of the whole call: each part of such a response arrives at once."""

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n" if b"header" in endless else b"")
            while True:
                writer.write(endless * 64)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        server = RemoteServer(f"http://127.0.0.1:{port}", timeout_seconds=0.5)
        with pytest.raises(RemoteFailure):
            await server.sample(group())
        await server.close()


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_an_error_status_is_a_failure_of_the_server(status: int) -> None:
    """The group can be requested elsewhere."""
    with pytest.raises(RemoteFailure, match=str(status)):
        await answering(b'{"error": {"message": "no"}}', status).sample(group())


async def test_a_refused_request_names_the_field(tmp_path: Path) -> None:
    """The request itself is wrong, so no other server is asked."""
    with servers(tmp_path, 1) as [server], pytest.raises(RequestError) as refused:
        await server.client().sample(group(prompt=(9999,), sampling=Sampling(max_tokens=2)))
    assert refused.value.param == "prompt"


async def test_connection_errors_are_failures_of_the_server() -> None:
    """They do not leave the client as other exceptions."""

    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(RemoteFailure, match="ConnectError"):
        await answering(refuse).served()


async def test_sent_weights_are_served(tmp_path: Path) -> None:
    """The server reports their version, fingerprint and run, and samples with them."""
    with servers(tmp_path, 1) as [server]:
        parameters, digest = server.moved(0.5)
        before = await server.client().sample(group())
        ready = WeightsReady(version=4, step=5, fingerprint=digest)
        served = await server.client().push(Weights(ready=ready, parameters=parameters))
        assert (served.version, served.step, served.fingerprint, served.run_id) == (4, 5, digest, "run")
        after = await server.client().sample(group())
        assert after.fingerprints == {4: digest}
        assert after.completions != before.completions


async def test_the_api_key_is_sent_with_every_call() -> None:
    """As a bearer token."""
    seen: list[str] = []

    def record(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["authorization"])
        return httpx.Response(401, stream=httpx.ByteStream(b""))

    server = RemoteServer("http://server", api_key="s3cret", transport=httpx.MockTransport(record))
    for call in (server.served(), server.sample(group())):
        with pytest.raises(RemoteFailure, match="401"):
            await call
    assert seen == ["Bearer s3cret"] * 2


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_an_invalid_address_is_refused(url: str) -> None:
    """Before the run starts."""
    with pytest.raises(ProfileError, match="server_url"):
        server_address(url)


def test_the_name_of_a_server_has_no_credentials() -> None:
    """Logs show the name."""
    assert RemoteServer("http://user:secret@host:81/?key=secret").name == "http://host:81"
