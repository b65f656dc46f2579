"""An actor that keeps a process of another interpreter alive, and ends it with the run.

What a process of ours prints: kept in a file that does not grow without bound, its last lines at hand.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT

import anyio
import structlog
from anyio.abc import Process, TaskStatus
from msgspec import Struct, json

from clotho.atropos.commands import Command
from clotho.atropos.parent_watchdog import GRACE_SECONDS
from protocols.errors import ActorError, ProfileError

FILE_BYTES = 16 * 2**20
"""Beyond, the file becomes NAME.log.1, in place of an older one."""
LINE_BYTES = 65_536
"""A longer line is broken."""
LAST_LINES = 20
SHOWN_CHARACTERS = 200
MASK = b"********"
ENDS_OF_LINES = re.compile(rb"[\r\n]+")
ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
"""How the last part of a traceback begins."""
ORNAMENTS = " \t\xb7^~|=-_*#"


class Output:
    """The file, and the last lines.

    path: of the file; only its owner can read it. secret: what is masked wherever it appears on one line.
    """

    def __init__(self, path: Path, *, secret: str = "") -> None:
        self.path = path
        self._secret = secret.encode()
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> None:
        """Append to the file from here on, and forget the last lines."""
        self.close()
        self._lines.clear()
        self._open()

    def write(self, chunk: bytes) -> list[str]:
        """Take what was printed next; the lines that are whole now."""
        *whole, self._rest = ENDS_OF_LINES.split(self._rest + chunk)
        while len(self._rest) > LINE_BYTES:
            whole.append(self._rest[:LINE_BYTES])
            self._rest = self._rest[LINE_BYTES:]
        return [self._keep(line) for line in whole if line]

    def close(self) -> None:
        """Write what is left; the second time does nothing."""
        if self._descriptor is None:
            return
        if self._rest:
            self._keep(self._rest)
            self._rest = b""
        os.close(self._descriptor)
        self._descriptor = None

    def last_words(self) -> str:
        """What it said at the end, on one line, cut: the error of a Python traceback, or the last line that says any.

        Empty if it said nothing.
        """
        spoken = [line.strip() for line in self._lines if line.strip(ORNAMENTS)]
        begins = [number for number, line in enumerate(spoken) if ERROR.match(line)]
        text = " ".join(spoken[begins[-1] if begins else -1 :])
        return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."

    def _keep(self, line: bytes) -> str:
        if self._secret:
            line = line.replace(self._secret, MASK)
        with suppress(OSError):  # a full disk is said by whoever must write there
            self._append(line + b"\n")
        text = "".join(c if c.isprintable() else "\xb7" for c in line.decode("utf-8", errors="replace"))
        self._lines.append(text)
        return text

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None, "opened before it is written to"
        if self._size and self._size + len(line) > FILE_BYTES:
            os.replace(self.path, f"{self.path}.1")
            before = self._descriptor
            self._open()  # where it fails, the old file goes on
            os.close(before)
        self._size += os.write(self._descriptor, line)

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._descriptor).st_size


log = structlog.get_logger(actor="atropos")

LEASH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("parent_watchdog.py")), "--")
SHORT_SECONDS = 60.0
"""A life that lasted longer was one, and everything before it is forgiven."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
MOST_FAILURES, MOST_DEATHS = 5, 20
"""Short lives in a row after which the run ends: those that ended with a status of their own, and all of them."""
TAIL_SECONDS = 1.0
"""How long somebody who was left behind may still print."""
SIGNALLED = 128


class Life(Struct, frozen=True, kw_only=True):
    """How a process ended. status: as shells have it, 128 + the signal's number; worked: whether it was of use yet."""

    status: int
    seconds: float
    worked: bool
    last_words: str

    @property
    def failed(self) -> bool:
        """Whether it ended by itself; else somebody killed it."""
        return self.status < SIGNALLED

    def __str__(self) -> str:
        """Say it in one clause."""
        how = f"ended with exit status {self.status}" if self.failed else f"was ended by {_signal(self.status)}"
        when = f"after {self.seconds:.0f} s" + ("" if self.worked else ", before it was ready")
        return f"{how} {when}" + (f": {self.last_words}" if self.failed and self.last_words else "")


class KeptProcess:
    """Runs a command in another process, again and again, with growing pauses, until it is cancelled.

    Raises ProfileError if the process ends by itself in its first life before it was of use: it cannot work as it is.
    Later, and where somebody killed it, it is started again; ActorError after `MOST_FAILURES` or `MOST_DEATHS` short
    lives in a row. When cancelled, or when we die, whatever it started ends too: SIGTERM, and SIGKILL after 5 seconds.

    name: as an actor. output: RUN_DIR/atropos/FILE.log. worked: set by subclasses once the process is of use.
    """

    def __init__(self, name: str, command: Command, output: Output) -> None:
        self.name, self.lives, self.worked = name, 0, False
        self._command, self._output = command, output
        self._task_status: TaskStatus[object] | None = None

    async def run(self, *, task_status: TaskStatus[object] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep it alive; `started` when others may count on it."""
        self._task_status = task_status
        failures = deaths = 0
        while True:
            await self.prepare()
            life = await self._live_and_bury()
            if life.seconds >= SHORT_SECONDS:
                failures = deaths = 0
            failures, deaths = failures + life.failed, deaths + 1
            if life.failed and self.lives == 1 and not life.worked and not self.innocent(life):
                raise ProfileError(f"{self._sentence(life)}; with --clean the run begins anew")
            if failures >= MOST_FAILURES or deaths >= MOST_DEATHS:
                raise ActorError(f"{self._sentence(life)}, the {deaths}th time in a row")
            pause = min(FIRST_PAUSE * 2 ** (deaths - 1), LONGEST_PAUSE)
            log.warning(f"the {self.name} {life}; it is started again in {pause:g} s", log=str(self._output.path))
            await anyio.sleep(pause)

    def ready(self) -> None:
        """Say, once, that others may count on it."""
        if self._task_status is not None:
            self._task_status.started()
        self._task_status = None

    async def prepare(self) -> None:
        """Wait until it makes sense to start the process."""

    async def attend(self) -> None:
        """Look after the process while it lives; returning is fine."""

    async def bury(self, life: Life | None) -> None:
        """Do what is left to be done after its death, quickly; None: it was ended with the run."""

    def heard(self, line: str) -> None:
        """Listen to a line that it printed."""

    def innocent(self, life: Life) -> bool:
        """Whether it ended for something that is not its own fault."""
        return False

    def _sentence(self, life: Life) -> str:
        return f"it {life} (all it printed: {self._output.path})"

    async def _live_and_bury(self) -> Life:
        life: Life | None = None
        try:
            life = await self._live()
        finally:
            with anyio.CancelScope(shield=True):
                await self.bury(life)
        return life

    async def _live(self) -> Life:
        self.lives, self.worked, began = self.lives + 1, False, time.monotonic()
        self._output.path.parent.mkdir(parents=True, exist_ok=True)
        self._output.open()
        try:
            async with self._running() as process, anyio.create_task_group() as group:
                group.start_soon(self.attend)
                heard = anyio.Event()
                group.start_soon(self._listen, process, heard)
                status = await process.wait()
                with anyio.move_on_after(TAIL_SECONDS):
                    await heard.wait()
                group.cancel_scope.cancel()
        finally:
            self._output.close()
        return Life(
            status=status if status >= 0 else SIGNALLED - status,
            seconds=time.monotonic() - began,
            worked=self.worked,
            last_words=self._output.last_words(),
        )

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[Process]:
        """The process, from its start to the end of it and of all that it started."""
        settings = self._write_settings()
        argv = [*LEASH, *self._command.argv, *([f"--config={settings}"] if settings else [])]
        process = await anyio.open_process(
            argv, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env=self._command.variables, start_new_session=True
        )
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
            if settings:
                settings.unlink(missing_ok=True)

    async def _listen(self, process: Process, heard: anyio.Event) -> None:
        assert process.stdout is not None
        async for chunk in process.stdout:
            for line in self._output.write(chunk):
                self.heard(line)
        heard.set()

    def _write_settings(self) -> Path | None:
        """Write what no command line should show into a file that its owner alone can read."""
        if not self._command.settings:
            return None
        path = self._output.path.with_suffix(".json").absolute()
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(json.encode(self._command.settings))
        return path


async def _end(process: Process) -> None:
    """Have the leash end everything; if it does not, end the leash."""
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(GRACE_SECONDS + 2.0):
            await process.wait()
    if process.returncode is None:
        process.kill()
    await process.aclose()


def _signal(status: int) -> str:
    try:
        return signal.Signals(status - SIGNALLED).name
    except ValueError:
        return f"signal {status - SIGNALLED}"
