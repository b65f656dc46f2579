"""TCP connections to the server, for requests that no HTTP client sends."""

from __future__ import annotations

import anyio
from anyio.abc import SocketStream

from tests.serving.running_server import Served


async def connect(served: Served) -> SocketStream:
    """Open a TCP connection."""
    host, port = served.url.removeprefix("http://").split(":")
    return await anyio.connect_tcp(host, int(port))


async def read_all(stream: SocketStream) -> bytes:
    """Read until the server closes the connection."""
    received = b""
    with anyio.fail_after(10):
        try:
            while True:
                received += await stream.receive()
        except anyio.EndOfStream:
            return received


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    """Return the head of a POST request."""
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *lines, "", ""]
    ).encode()
