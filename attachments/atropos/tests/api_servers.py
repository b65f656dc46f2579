"""The API server of atroposlib and a fake of it, with a client that behaves as environments do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import httpx
import msgspec

from attachments.atropos.api import AtroposApi
from attachments.atropos.client import Registration
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from attachments.atropos.tests.fake_api import FakeApi
from attachments.atropos.tests.polling import wait_until
from tests.e2e.child_processes import wait_until_ended

REGISTRATION = Registration(
    batch_size=4, max_token_len=64, checkpoint_dir="/nowhere", save_checkpoint_interval=5, num_steps=9
)
JSON = {"content-type": "application/json"}


class ApiServerUnderTest:
    """A server, and a client that behaves as environments do."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.url, self.transport = url, transport
        self.http = httpx.AsyncClient(base_url=url, transport=transport, timeout=20, trust_env=False)

    def api(self, **changes: Any) -> AtroposApi:
        """Return a trainer of this server."""
        reset = changes.pop("reset", True)
        registration = msgspec.structs.replace(REGISTRATION, **changes)
        return AtroposApi(self.url, registration=registration, reset=reset, poll_seconds=0.1, transport=self.transport)

    async def post(self, *groups: dict[str, Any]) -> None:
        """Send groups without an env_id."""
        for fields in groups:
            content = msgspec.json.encode(fields | {"env_id": None})
            (await self.http.post("/scored_data", content=content, headers=JSON)).raise_for_status()

    async def get(self, path: str) -> Any:
        """Send a GET request to the server."""
        return (await self.http.get(path)).json()

    async def join(self, **fields: Any) -> Any:
        """Register as an environment."""
        defaults = {"max_token_length": 64, "desired_name": "one", "weight": 1.0, "group_size": 2}
        return (await self.http.post("/register-env", json=defaults | fields)).json()

    async def start(self) -> None:
        """Start the server without any state."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop the server."""
        raise NotImplementedError


class Fake(ApiServerUnderTest):
    def __init__(self) -> None:
        self.fake = FakeApi()
        super().__init__("http://fake", self.fake)

    async def start(self) -> None:
        self.fake.restart()
        self.fake.away = None

    async def stop(self) -> None:
        self.fake.away = httpx.ConnectError("connection refused")


SERVERS = """
import os, signal, sys
import atroposlib.api
from atroposlib.cli import run_api

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers leave no entry
for line in sys.stdin:
    port, log = line.rstrip().split(" ", 1)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), written, written)):
            os.dup2(file, stream)
        sys.argv[1:] = ["--host", "127.0.0.1", "--port", port]
        run_api.main()
        os._exit(0)
    print(pid, flush=True)
"""
"""Starts atroposlib's API server at each port that it reads, with the log behind it, and prints the process ID."""


class ApiServers:
    """Starts atroposlib's API server in processes that share its import, which takes half a second."""

    def __enter__(self) -> Self:
        command = [python_with_atropos(), "-c", SERVERS]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        with self._parent:  # it ends at the end of its input
            pass

    def start(self, port: int, log: Path) -> int:
        """Start a server without any state; its process ID."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{port} {log}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


class Real(ApiServerUnderTest):
    """atroposlib's API server in a process."""

    def __init__(self, servers: ApiServers, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{self._port}")
        self._servers, self._log = servers, log
        self._pid = 0

    async def start(self) -> None:
        self._pid = await anyio.to_thread.run_sync(self._servers.start, self._port, self._log)
        await wait_until(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    async def stop(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            assert wait_until_ended([self._pid])
            self._pid = 0


@asynccontextmanager
async def running(server: ApiServerUnderTest) -> AsyncIterator[ApiServerUnderTest]:
    """Run a server."""
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
        await server.http.aclose()
