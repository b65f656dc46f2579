"""The API server of atroposlib and a fake of it, with a client that behaves as environments do."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from attachments.atropos.api import AtroposApi
from attachments.atropos.client import Registration
from attachments.atropos.tests.atroposlib_python import python_with_atropos
from attachments.atropos.tests.fake_api import FakeApi
from attachments.atropos.tests.polling import wait_until

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


class Real(ApiServerUnderTest):
    """atroposlib's API server in a process."""

    def __init__(self, python: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        super().__init__(f"http://127.0.0.1:{self._port}")
        self._python, self._log = python, log
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._spawn()
        await wait_until(self._listens)

    def _spawn(self) -> None:
        command = [self._python, "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@asynccontextmanager
async def api_server(kind: str, directory: Path) -> AsyncIterator[ApiServerUnderTest]:
    """Run a server of either kind."""
    server = Fake() if kind == "fake" else Real(python_with_atropos(), directory / "log")
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
        await server.http.aclose()
