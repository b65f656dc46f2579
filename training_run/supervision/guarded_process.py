"""Processes that run code of the user: start, answers within limits, output, and end; and the side of the process.

Code of the user may crash, hold the GIL, fork, close descriptors, send signals or use all memory. Each such process has
a session, a socket and an output pipe of its own. A frame on the socket is four bytes with the length, little endian,
and one message as MessagePack.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import Struct, msgpack
from msgspec.structs import replace

CONNECTION_LOST = 97
"""Exit status of a worker whose socket was closed by its own function."""

LENGTH_BYTES = 4
LOWEST_DESCRIPTOR = 200
"""The socket has a high number, so that a file opened by the function does not take its place."""

PARENT_POLL_SECONDS = 0.5

PR_SET_CHILD_SUBREAPER = 36
"""Option of `prctl`: Linux makes this process the parent of descendants whose parent has ended."""

IMPORT_SECONDS = 300.0
"""Time limit for the start of a worker, which imports the user's module."""

POLL_SECONDS = 0.1
"""Interval of the checks whether the process of a running call is alive and within its memory limit."""

WATCH_SECONDS = 1.0
"""Interval of the checks whether a process that nobody asks is within its memory limit."""

EXIT_SECONDS = 1.0
"""Time for a worker to exit by itself."""

GRACE_SECONDS = 1.0
"""Time for an asynchronous function to be cancelled at its time limit."""

MAX_ANSWER_BYTES = 2**20

OUTPUT_BYTES = 65_536
OUTPUT_PAUSE_SECONDS = 0.05
"""At most `OUTPUT_BYTES` are read at once, with this pause. A function that prints faster waits."""

MAX_OUTPUT_LINES, MAX_LINE_CHARACTERS = 1000, 500
"""Limits of the output of one function or environment in the event log."""

Message = TypeVar("Message")
Request = TypeVar("Request")


class ProcessSettings(Struct, frozen=True, kw_only=True):
    """Parent -> process that runs code of the user, in the command line.

    memory_bytes: limit of the private memory, which Linux enforces, and of the resident memory, which the parent reads
    on every system: macOS has no limit of its own. The start of the process sets the others. path: `sys.path`. parent:
    process id. descriptor: of the socket.
    """

    memory_bytes: int
    path: list[str] = []
    parent: int = 0
    descriptor: int = -1


def boot(module: str) -> str:
    """Return the program whose argument are the settings of a process, and which calls `main` of the module with them.

    The path must be set before the first import of the project.
    """
    path = "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']"
    return f"{path}; from {module} import main; main(sys.argv[1])"


def python_module(module: str) -> tuple[str, ...]:
    """Return the command of a process whose program is `main` of a module of the project."""
    return sys.executable, "-c", boot(module)


def frame(message: Struct) -> bytes:
    """Return a message with its length."""
    content = msgpack.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


class WorkerChannel:
    """The worker's end of the socket. If the function closed it, the process ends with status `CONNECTION_LOST`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR)
        os.close(descriptor)
        self._identity = self._stat()

    def send(self, message: Struct) -> None:
        """Send one message."""
        content = memoryview(frame(message))
        try:
            if self._stat() != self._identity:  # another file has the number now
                os._exit(CONNECTION_LOST)
            while content:
                content = content[os.write(self.descriptor, content) :]
        except OSError:
            os._exit(CONNECTION_LOST)

    def receive(self, kind: type[Request]) -> Request | None:
        """Wait for the next request; None if the parent closed the socket."""
        header = self._read(LENGTH_BYTES)
        if len(header) < LENGTH_BYTES:
            return None
        return msgpack.decode(self._read(int.from_bytes(header, "little")), type=kind)

    async def arriving(self, kind: type[Request]) -> AsyncIterator[Request]:
        """Yield the requests until the parent closes the socket. Between two requests, the event loop runs."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        while True:
            arrived.clear()
            loop.add_reader(self.descriptor, arrived.set)
            await arrived.wait()
            loop.remove_reader(self.descriptor)
            if (request := self.receive(kind)) is None:
                return
            yield request

    def _read(self, size: int) -> bytes:
        content = bytearray()
        try:
            while len(content) < size:
                if not (chunk := os.read(self.descriptor, size - len(content))):
                    break
                content += chunk
        except ConnectionError:
            return b""
        except OSError:
            os._exit(CONNECTION_LOST)
        return bytes(content)

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino


def guard(settings: ProcessSettings) -> None:
    """Limit the memory, and arrange for the end of this process when its parent ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # unlike the address space, the data do not include reservations and files of libraries
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = settings.memory_bytes if hard == resource.RLIM_INFINITY else min(settings.memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # if memory runs out, Linux ends this process before the run
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=_end_with_parent, args=(settings.parent,), daemon=True).start()


def exit_if_forked(process: int) -> None:
    """End a process that is not the one with this id: a copy that code of the user has forked must not answer."""
    if os.getpid() != process:
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    end_descendants(os.getpid())
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_descendants(process: int) -> None:
    """Kill the processes that descend from a worker, in whatever session. On macOS, a detached one is not found."""
    import psutil  # not needed before the end

    with suppress(psutil.Error):
        worker, killed = psutil.Process(process), set[psutil.Process]()
        while found := set(worker.children(recursive=True)) - killed:
            for child in found:
                with suppress(psutil.Error):
                    child.kill()
            killed |= found


class GuardedProcess:
    """A process that runs code of the user: its start, its answers within limits, its output, and its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: ProcessSettings,
        *,
        limit_key: str,
        ended: Callable[[str], Exception],
        on_output: Callable[[bytes], None],
    ) -> None:
        """Start the process. Needs a running event loop. Raises OSError if the system refuses.

        name: in errors, such as `reward length`. command: without its last argument, the settings. limit_key: setting
        of the memory limit. ended: error for a process that ended or was killed.
        """
        self._name, self._limit_key, self._ended, self._on_output = name, limit_key, ended, on_output
        self._memory_bytes = settings.memory_bytes
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output, their_output = os.pipe()
        os.set_blocking(self._output, False)
        whole = replace(settings, path=sys.path, parent=os.getpid(), descriptor=theirs.fileno())
        try:
            self._process = subprocess.Popen(
                [*command, msgspec.json.encode(whole).decode()],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        self._loop.add_reader(self._output, self._read_output)

    @property
    def alive(self) -> bool:
        """Whether the process runs. Reaps a process that has ended."""
        return self._process.poll() is None

    def leave(self) -> None:
        """Let an idle process exit by itself: it reads the end of its socket."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kill the process, its group, and what descends from it. A stopped process starts no further ones."""
        with suppress(ProcessLookupError, PermissionError):  # no process is left; macOS: only zombies are left
            os.killpg(self._process.pid, signal.SIGSTOP)
            if self._process.returncode is None:
                end_descendants(self._process.pid)
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._output >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._output)
                self._loop.remove_reader(self._socket)
                self._loop.remove_writer(self._socket)
            self._socket.close()
            os.close(self._output)
            self._output = -1
        if self._process.poll() is None:  # freeing gigabytes takes a while
            threading.Thread(target=self._process.wait, name="process-reaper", daemon=True).start()

    def end(self, reason: str) -> Exception:
        """Kill the process, and return the error."""
        self._read_output()
        self.kill()
        return self._ended(f"{self._name} {reason}")

    async def answer(
        self, request: bytes, kind: type[Message], limit_seconds: float, *, grace_seconds: float = 0.0
    ) -> Message:
        """Send the request and wait for a message of this kind, within the time and memory limits. Raises `ended`.

        A cancelled wait kills the process.
        """
        deadline = self._loop.time() + limit_seconds + grace_seconds
        receiving = asyncio.ensure_future(self._exchange(request, kind))
        try:
            while True:
                left = deadline - self._loop.time()
                await asyncio.wait({receiving}, timeout=max(0.0, min(POLL_SECONDS, left)))
                if receiving.done():
                    message = receiving.result()
                    self._require_memory()
                    return message
                if left <= 0:
                    raise self.end(f"took longer than {limit_seconds:g} s")
                if not self.alive:
                    await asyncio.wait({receiving}, timeout=POLL_SECONDS)  # an answer may have arrived before the end
                    if not receiving.done():
                        raise self.end(self._how_it_ended())
                self._require_memory()
        except asyncio.CancelledError:
            self.kill()
            raise
        except (EOFError, OSError, ValueError) as error:
            raise await self._broken(error) from None
        finally:
            receiving.cancel()

    async def send(self, request: bytes) -> None:
        """Send a request, one at a time. Raises `ended` if the process has ended."""
        try:
            await self._loop.sock_sendall(self._socket, request)
        except OSError as error:
            raise await self._broken(error) from None

    async def receive(self, kind: type[Message]) -> Message:
        """Wait for a message. Raises `ended` if the process has ended, or is over its memory limit."""
        receiving = asyncio.ensure_future(self._received(kind))
        try:
            while not receiving.done():
                await asyncio.wait({receiving}, timeout=WATCH_SECONDS)
                if not receiving.done():
                    self._require_memory()
            return receiving.result()
        except (EOFError, OSError, ValueError) as error:
            raise await self._broken(error) from None
        finally:
            receiving.cancel()

    async def _exchange(self, request: bytes, kind: type[Message]) -> Message:
        await self._loop.sock_sendall(self._socket, request)
        return await self._received(kind)

    async def _received(self, kind: type[Message]) -> Message:
        size = int.from_bytes(await self._receive(LENGTH_BYTES), "little")
        if size > MAX_ANSWER_BYTES:
            raise msgspec.ValidationError("the answer is too long")
        return msgpack.decode(await self._receive(size), type=kind)

    async def _receive(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if not (chunk := await self._loop.sock_recv(self._socket, size - len(content))):
                raise EOFError
            content += chunk
        return bytes(content)

    async def _broken(self, error: Exception) -> Exception:
        """End the process for an error of its connection or of its message, and return the error to raise."""
        if isinstance(error, ValueError):
            return self.end("sent an invalid answer")
        deadline = self._loop.time() + EXIT_SECONDS
        while self.alive and self._loop.time() < deadline:  # noqa: ASYNC110  (the system has no event for it)
            await asyncio.sleep(EXIT_SECONDS / 100)
        return self.end(self._how_it_ended())

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        if status is None or status == CONNECTION_LOST:
            return "closed the connection of its process"
        if status < 0:
            return f"ended its process with signal {_signal_name(-status)}"
        return f"ended its process with exit status {status}"

    def _require_memory(self) -> None:
        """Raise `ended`, and end the process, if it holds more memory than its limit."""
        import psutil  # the process itself does not need it

        with suppress(psutil.Error):
            if psutil.Process(self._process.pid).memory_info().rss > self._memory_bytes:
                limit = self._memory_bytes // 2**20
                raise self.end(f"used more than {limit} MB of memory ({self._limit_key})")

    def _read_output(self) -> None:
        try:
            content = os.read(self._output, OUTPUT_BYTES)
        except OSError:
            return
        if not content:
            self._loop.remove_reader(self._output)
            return
        self._on_output(content)
        if len(content) == OUTPUT_BYTES:
            self._loop.remove_reader(self._output)
            self._loop.call_later(OUTPUT_PAUSE_SECONDS, self._read_on)

    def _read_on(self) -> None:
        if self._output >= 0:
            self._loop.add_reader(self._output, self._read_output)


class OutputLog:
    """What code of the user prints, as events such as `reward_output` in the event log.

    Output before the first call is kept.
    """

    def __init__(self, kind: str, name: str) -> None:
        """kind: of the code, such as `reward`. last_line: the last one with text."""
        import structlog  # the process itself does not need it

        self._log = structlog.get_logger(__name__)
        self._kind, self._name = kind, name
        self.last_line = ""
        self._partial = b""
        self._held: list[bytes] | None = []
        self._lines = 0

    def add(self, content: bytes) -> None:
        """Add output of any process of the code."""
        *lines, rest = (self._partial + content).split(b"\n")
        self._partial = rest[:MAX_LINE_CHARACTERS]
        with_text = (line for line in reversed(lines) if line.strip())
        self.last_line = next(with_text, b"").decode(errors="replace")[:MAX_LINE_CHARACTERS] or self.last_line
        for line in lines[: MAX_OUTPUT_LINES + 1 - self._lines]:
            self._lines += 1
            if self._held is None:
                self._write(self._lines, line)
            else:
                self._held.append(line)

    def begin(self) -> None:
        """Write the lines that were kept: the event log is open now."""
        held, self._held = self._held, None
        for number, line in enumerate(held or (), start=1):
            self._write(number, line)

    def _write(self, number: int, line: bytes) -> None:
        source = {self._kind: self._name}
        if number <= MAX_OUTPUT_LINES:
            text = line[:MAX_LINE_CHARACTERS].decode(errors="replace")
            self._log.info(f"{self._kind}_output", line=text, **source)
        else:
            self._log.warning(f"{self._kind}_output_suppressed", after_lines=MAX_OUTPUT_LINES, **source)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
