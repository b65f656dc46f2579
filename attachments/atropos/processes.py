"""Actors that run the processes of Atropos: the API server and each environment, restarted when they exit."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx
import structlog
from anyio.abc import Process, TaskStatus
from msgspec import Struct, json

from attachments.atropos.commands import Command, environment_command, server_command
from attachments.atropos.sections import SERVER, EnvironmentSection
from protocols.errors import ActorError, ProfileError, visible
from training_run.profile.schema import Profile
from training_run.supervision.child_process import end_child, start_child
from training_run.supervision.supervisor import Backoff, RestartCounter, RestartPolicy

LOG_FILE_BYTES = 16 * 2**20
"""A larger log file becomes NAME.log.1 and replaces the previous one."""
LINE_BYTES = 65_536
"""A longer line is split."""
LAST_LINES = 20
MAX_ERROR_CHARACTERS = 200
MASK = b"********"
LINE_ENDS = re.compile(rb"[\r\n]+")
EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
"""Start of the last line of a traceback."""
ORNAMENTS = " \t\xb7^~|=-_*#"

EXIT_POLICY = RestartPolicy(max_restarts=19, first_pause_seconds=0.5, longest_pause_seconds=8.0)
"""Limits the restarts after exits of any kind."""
FAILURE_POLICY = RestartPolicy(max_restarts=4)
"""Limits the restarts after exits that a signal did not cause."""
TAIL_SECONDS = 1.0
"""Time for reading the remaining output after the exit."""
SIGNALLED = 128

READY_SECONDS = 120.0
MAX_POLL_SECONDS = 1.0
REQUEST_SECONDS, DISCONNECT_SECONDS = 5.0, 1.0
SERVER_LOG = "api-server"
"""Name of the server's log file, which no environment may have."""
SERVER_LOST = "RetryError"
"""The exception with which an environment exits after three failed requests to the API server."""
REGISTERED = re.compile(r"Initialized env with id (\d+)")

log = structlog.get_logger(actor="atropos")


class ProcessLog:
    """The log file of a process, and its last lines in memory.

    path: of the file, readable only by its owner. secret: masked wherever it occurs in a line.
    """

    def __init__(self, path: Path, *, secret: str = "") -> None:
        self.path = path
        self._secret = secret.encode()
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Open the file for appending, and clear the lines in memory."""
        self.close()
        self._lines.clear()
        self._open()

    def write(self, chunk: bytes) -> list[str]:
        """Append output of the process; return the lines that are complete now."""
        *lines, self._partial = LINE_ENDS.split(self._partial + chunk)
        while len(self._partial) > LINE_BYTES:
            lines.append(self._partial[:LINE_BYTES])
            self._partial = self._partial[LINE_BYTES:]
        return [self._append_line(line) for line in lines if line]

    def close(self) -> None:
        """Write the last incomplete line and close the file; a second call does nothing."""
        if self._descriptor is None:
            return
        if self._partial:
            self._append_line(self._partial)
            self._partial = b""
        os.close(self._descriptor)
        self._descriptor = None

    def error_line(self) -> str:
        """Return the exception of a Python traceback, or the last line with text, shortened to one line.

        Returns an empty string if the process has printed nothing.
        """
        lines = [line.strip() for line in self._lines if line.strip(ORNAMENTS)]
        exceptions = [number for number, line in enumerate(lines) if EXCEPTION.match(line)]
        text = " ".join(lines[exceptions[-1] if exceptions else -1 :])
        return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."

    def _append_line(self, line: bytes) -> str:
        if self._secret:
            line = line.replace(self._secret, MASK)
        with suppress(OSError):  # a full disk is reported by the writers of the run directory
            self._write(line + b"\n")
        text = visible(line.decode("utf-8", errors="replace"), LINE_BYTES)
        self._lines.append(text)
        return text

    def _write(self, line: bytes) -> None:
        assert self._descriptor is not None, "the log is open"
        if self._size and self._size + len(line) > LOG_FILE_BYTES:
            os.replace(self.path, f"{self.path}.1")
            previous = self._descriptor
            self._open()  # if this fails, the old file stays in use
            os.close(previous)
        self._size += os.write(self._descriptor, line)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._descriptor).st_size


class ProcessExit(Struct, frozen=True, kw_only=True):
    """How a process ended.

    status: exit status, or 128 + the number of the signal. ready: the process was ready before it ended.
    error: the last error that it printed.
    """

    status: int
    seconds: float
    ready: bool
    error: str

    @property
    def failed(self) -> bool:
        """Whether the process ended by itself, not by a signal."""
        return self.status < SIGNALLED

    def __str__(self) -> str:
        """Describe the exit in one clause."""
        how = f"exited with status {self.status}" if self.failed else f"was ended by {_signal_name(self.status)}"
        when = f"after {self.seconds:.0f} s" + ("" if self.ready else ", before it was ready")
        return f"{how} {when}" + (f": {self.error}" if self.failed and self.error else "")


class ProcessActor:
    """Runs a command in a process and restarts it with increasing delays until the actor is cancelled.

    Raises ProfileError if the process ends by itself in its first run before it is ready: the command cannot work. A
    later exit, or an exit by a signal, causes a restart. Raises ActorError if `FAILURE_POLICY` or `EXIT_POLICY` allows
    no further restart. When the actor is cancelled, or this process dies, the whole process group ends: SIGTERM, and
    SIGKILL after 5 seconds.

    starts: number of starts so far. ready: set by subclasses when the process is ready.
    """

    def __init__(self, name: str, command: Command, output: ProcessLog) -> None:
        self.name, self.starts, self.ready = name, 0, False
        self._command, self._output = command, output
        self._task_status: TaskStatus[object] | None = None

    async def run(self, *, task_status: TaskStatus[object] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the process running; `started` when other actors can depend on it."""
        self._task_status = task_status
        exits, failures = RestartCounter(EXIT_POLICY), RestartCounter(FAILURE_POLICY)
        while True:
            await self.prepare()
            ended = await self._run_once()
            if ended.failed and self.starts == 1 and not ended.ready and not self.caused_elsewhere(ended):
                raise ProfileError(f"{self._describe(ended)}; after correcting it, start the run with --clean")
            if ended.seconds >= EXIT_POLICY.stable_seconds:
                failures = RestartCounter(FAILURE_POLICY)
            delay = exits.next_pause(ended.seconds)
            gives_up = ended.failed and failures.next_pause(ended.seconds) is None
            if delay is None or gives_up:
                raise ActorError(f"{self._describe(ended)}, {exits.in_a_row} times in a row")
            log.warning(
                "process_restarts",
                process=self.name,
                reason=str(ended),
                delay_seconds=delay,
                log=str(self._output.path),
            )
            await anyio.sleep(delay)

    def report_started(self) -> None:
        """Report, once, that other actors can depend on the process."""
        if self._task_status is not None:
            self._task_status.started()
        self._task_status = None

    async def prepare(self) -> None:
        """Wait until the process can be started."""

    async def monitor(self) -> None:
        """Run beside the process; may return before it ends."""

    async def clean_up(self, ended: ProcessExit | None) -> None:
        """Run after the process has ended; None: it was ended with the run."""

    def on_line(self, line: str) -> None:
        """Handle a line that the process has printed."""

    def caused_elsewhere(self, ended: ProcessExit) -> bool:
        """Return True if the process ended because of an error outside of it."""
        return False

    def _describe(self, ended: ProcessExit) -> str:
        return f"the process {ended} (output: {self._output.path})"

    async def _run_once(self) -> ProcessExit:
        ended: ProcessExit | None = None
        try:
            ended = await self._run_process()
        finally:
            with anyio.CancelScope(shield=True):
                await self.clean_up(ended)
        return ended

    async def _run_process(self) -> ProcessExit:
        self.starts, self.ready, started = self.starts + 1, False, time.monotonic()
        self._output.path.parent.mkdir(parents=True, exist_ok=True)
        self._output.open()
        try:
            async with self._process() as process, anyio.create_task_group() as group:
                group.start_soon(self.monitor)
                read = anyio.Event()
                group.start_soon(self._read_output, process, read)
                status = await process.wait()
                with anyio.move_on_after(TAIL_SECONDS):
                    await read.wait()
                group.cancel_scope.cancel()
        finally:
            self._output.close()
        return ProcessExit(
            status=status if status >= 0 else SIGNALLED - status,
            seconds=time.monotonic() - started,
            ready=self.ready,
            error=self._output.error_line(),
        )

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[Process]:
        """Start the process; end it and its process group when the block ends."""
        settings = self._write_settings()
        argv = [*self._command.argv, *([f"--config={settings}"] if settings else [])]
        process = await start_child(argv, variables=self._command.variables)
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await end_child(process)
            if settings:
                settings.unlink(missing_ok=True)

    async def _read_output(self, process: Process, read: anyio.Event) -> None:
        assert process.stdout is not None
        async for chunk in process.stdout:
            for line in self._output.write(chunk):
                self.on_line(line)
        read.set()

    def _write_settings(self) -> Path | None:
        """Write the settings that no command line should show to a file that only its owner can read."""
        if not self._command.settings:
            return None
        path = self._output.path.with_suffix(".json").absolute()
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(json.encode(self._command.settings))
        return path


def _signal_name(status: int) -> str:
    try:
        return signal.Signals(status - SIGNALLED).name
    except ValueError:
        return f"signal {status - SIGNALLED}"


class AtroposServer(ProcessActor):
    """atroposlib's API server. Restarts keep its address; the server's queue is lost with every restart.

    url: address of the server.
    """

    def __init__(self, python: str, *, directory: Path) -> None:
        """python: the interpreter. directory: for the logs of the processes."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = server_command(python, port=port)
        super().__init__(SERVER, command, ProcessLog(directory / f"{SERVER_LOG}.log"))

    async def monitor(self) -> None:
        """Wait for the first response. Raises ActorError if the server does not respond in time."""
        with anyio.move_on_after(READY_SECONDS):
            await until_available(self.url)
            self.ready = True
            self.report_started()
            return
        raise ActorError(f"the Atropos API server at {self.url} does not respond within {READY_SECONDS:g} s")


class Environment(ProcessActor):
    """One environment: started when the API server responds, and disconnected from the server when it ends.

    Without the disconnect the server would wait forever for the share that the environment had reserved.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        profile: Profile,
        *,
        server_url: str,
        server_starts: Callable[[], int],
        policy_url: str,
        directory: Path,
    ) -> None:
        """server_url: of the API server. server_starts: returns the number of starts of the API server, if known.

        policy_url: of the policy's HTTP API. directory: for the logs of the processes.
        """
        command = environment_command(section, profile, server_url=server_url, policy_url=policy_url)
        output = ProcessLog(directory / f"{section.name}.log", secret=command.secret)
        super().__init__(f"environment {section.name}", command, output)
        self._server_url = server_url.rstrip("/")
        self._server_starts = server_starts
        self._env_id: int | None = None
        self._registered_at_start = 0

    async def prepare(self) -> None:
        """Wait for the API server. No actor waits for an environment."""
        self.report_started()
        await until_available(self._server_url)
        self._env_id = None

    def on_line(self, line: str) -> None:
        """Read the environment's number from its output."""
        if match := REGISTERED.match(line):
            self._env_id, self.ready = int(match[1]), True
            self._registered_at_start = self._server_starts()

    def caused_elsewhere(self, ended: ProcessExit) -> bool:
        """Return True if the API server was unavailable."""
        return ended.failed and SERVER_LOST in ended.error

    async def clean_up(self, ended: ProcessExit | None) -> None:
        """Disconnect the environment from the server. A restarted server may use its number for another environment."""
        env_id, self._env_id = self._env_id, None
        if env_id is None or self._server_starts() != self._registered_at_start:
            return
        async with httpx.AsyncClient(trust_env=False, timeout=DISCONNECT_SECONDS) as client:
            try:
                await client.post(f"{self._server_url}/disconnect-env", json={"env_id": env_id})
            except (httpx.HTTPError, httpx.InvalidURL):
                return


async def until_available(url: str) -> None:
    """Wait until an API server responds."""
    backoff = Backoff(max_seconds=MAX_POLL_SECONDS)
    async with httpx.AsyncClient(trust_env=False, timeout=REQUEST_SECONDS) as client:
        while True:
            if await _is_available(client, url):
                return
            await anyio.sleep(backoff.next_seconds())


async def _is_available(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/")).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
