"""The processes of a run that learns from environments: the API server, and each environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import anyio
import httpx

from clotho.atropos.commands import environment_command, server_command
from clotho.atropos.process import KeptProcess, Life, Output
from clotho.atropos.source import Pauses
from clotho.config.schema import EnvironmentSection, Profile
from protocols.errors import ActorError

READY_SECONDS = 120.0
LONGEST_PAUSE = 1.0
REQUEST_SECONDS, FAREWELL_SECONDS = 5.0, 1.0
SERVER_LOG = "api-server"
"""Name of its log, which no environment may have."""
SERVER_TROUBLE = "RetryError"
"""What an environment dies of when its server has gone, three requests having failed."""
REGISTERED = re.compile(r"Initialized env with id (\d+)")


class AtroposServer(KeptProcess):
    """atroposlib's API server, at the same address through all its lives; what it held is lost with each.

    url: where it answers.
    """

    def __init__(self, profile: Profile, *, directory: Path) -> None:
        """directory: of the run's logs of processes."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = server_command(profile.atropos.python, port=port)
        super().__init__("atropos server", command, Output(directory / f"{SERVER_LOG}.log"))

    async def attend(self) -> None:
        """Wait for its first answer. Raises ActorError if it lives without ever answering."""
        with anyio.move_on_after(READY_SECONDS):
            await until_answers(self.url)
            self.worked = True
            self.ready()
            return
        raise ActorError(f"it does not answer on {self.url} within {READY_SECONDS:g} s")


class Environment(KeptProcess):
    """One environment: started when the API server answers, and taken off its books when it ends.

    A server that waits for a share of an environment that has gone would hand out nothing any more.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        profile: Profile,
        *,
        server_url: str,
        server_lives: Callable[[], int],
        gateway_url: str,
        directory: Path,
    ) -> None:
        """server_url: of the API server; server_lives: how often it was started, if that is known.

        gateway_url: where the policy answers; directory: as for the server.
        """
        command = environment_command(section, profile, server_url=server_url, gateway_url=gateway_url)
        output = Output(directory / f"{section.name}.log", secret=command.secret)
        super().__init__(f"environment {section.name}", command, output)
        self._server_url = server_url.rstrip("/")
        self._server_lives = server_lives
        self._registered_as: int | None = None
        self._registered_in = 0

    async def prepare(self) -> None:
        """Wait for the server; nobody waits for an environment."""
        self.ready()
        await until_answers(self._server_url)
        self._registered_as = None

    def heard(self, line: str) -> None:
        """Learn its number from what it prints."""
        if match := REGISTERED.match(line):
            self._registered_as, self.worked = int(match[1]), True
            self._registered_in = self._server_lives()

    def innocent(self, life: Life) -> bool:
        """Whether its server had gone."""
        return life.failed and SERVER_TROUBLE in life.last_words

    async def bury(self, life: Life | None) -> None:
        """Take it off the server's books; a server that has gone may have given its number to somebody else."""
        number, self._registered_as = self._registered_as, None
        if number is None or self._server_lives() != self._registered_in:
            return
        async with httpx.AsyncClient(trust_env=False, timeout=FAREWELL_SECONDS) as client:
            try:
                await client.post(f"{self._server_url}/disconnect-env", json={"env_id": number})
            except (httpx.HTTPError, httpx.InvalidURL):
                return


async def until_answers(url: str) -> None:
    """Wait until an API server answers."""
    pauses = Pauses(longest=LONGEST_PAUSE)
    async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_SECONDS) as client:
        while True:
            if await _answers(client, url):
                return
            await anyio.sleep(pauses.next())


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/")).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
