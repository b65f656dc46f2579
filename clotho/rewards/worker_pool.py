"""Worker processes of reward functions: start, time and memory limits, replacement.

A function of the user may crash, hold the GIL, fork, close descriptors, send signals or use all memory. In a process of
its own, each of these costs one call: the process is killed and replaced, and the group is discarded with the reason.

Why not a library: the workers of `pebble` and `loky` belong to the process group of the run, so a function that
signals its group ends the run. Children that a function forks outlive the pool. `loky` has no time limit that kills.
Both answer with pickles, which the run would execute. Here each worker has a session, a socket and an output pipe of
its own, and answers are validated MessagePack.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
import structlog
from msgspec import Struct, msgpack
from msgspec.structs import replace

from clotho.rewards.registry import GroupParameters, RewardOptions
from clotho.rewards.values import Completions, RewardError, Values, too_large
from clotho.rewards.worker import (
    BOOT,
    CONNECTION_LOST,
    LENGTH_BYTES,
    Answer,
    Call,
    Failure,
    Ready,
    Refused,
    WorkerMessage,
    WorkerSettings,
    frame,
)
from protocols.errors import ProfileError

IMPORT_SECONDS = 300.0
"""Time limit for the start of a worker, which imports the user's module."""

POLL_SECONDS = 0.1
"""Interval of the checks whether the process of a running call is alive and within its memory limit."""

EXIT_SECONDS = 1.0
"""Time for a worker to exit by itself."""

GRACE_SECONDS = 1.0
"""Time for an asynchronous function to be cancelled at its time limit."""

MAX_ENDED, WINDOW_SECONDS = 32, 600.0
"""Maximum number of workers of one function that end by a fault within the window. No more are started then."""

MAX_ANSWER_BYTES = 2**20

OUTPUT_BYTES = 65_536
OUTPUT_PAUSE_SECONDS = 0.05
"""At most `OUTPUT_BYTES` are read at once, with this pause. A function that prints faster waits."""

MAX_OUTPUT_LINES, MAX_LINE_CHARACTERS = 1000, 500
"""Limits of the output of one function in the event log."""

log = structlog.get_logger(__name__)


class WorkerEnded(RewardError):
    """The worker process ended, or was killed at a limit. It cannot be used again."""


class ProcessFunction(Struct, frozen=True, kw_only=True):
    """A function in worker processes. The time limit of the options is that of a call, which scores one group."""

    name: str
    options: RewardOptions
    memory_bytes: int


class WorkerProcess:
    """One worker process. Answers one call at a time."""

    def __init__(self, function: ProcessFunction, *, on_output: Callable[[bytes], None]) -> None:
        """Start the process. Needs a running event loop. Raises OSError if the system refuses."""
        self._function, self._on_output = function, on_output
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._asynchronous = False
        self.group: GroupParameters | None = None
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output, their_output = os.pipe()
        os.set_blocking(self._output, False)
        settings = WorkerSettings(
            name=function.name,
            options=function.options,
            path=sys.path,
            parent=os.getpid(),
            descriptor=theirs.fileno(),
            memory_bytes=function.memory_bytes,
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, msgspec.json.encode(settings).decode()],
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

    async def ready(self) -> None:
        """Wait until the function is imported. Raises ProfileError if it cannot be used, and WorkerEnded."""
        message = await self._answer(b"", IMPORT_SECONDS)
        if isinstance(message, Refused):
            self.kill()
            raise ProfileError(message.message)
        if not isinstance(message, Ready):
            raise self._end("sent an invalid answer")
        self._asynchronous, self.group = message.asynchronous, message.group

    async def call(self, completions: Completions) -> Values:
        """Return the values of the function. Raises RewardError, and WorkerEnded if the process cannot be used again.

        A cancelled call kills the process.
        """
        self._number += 1
        if self.group is None or not self.group.accepts("completion_ids"):
            completions = replace(completions, tokens=())
        request = frame(Call(number=self._number, completions=completions))
        limit = self._function.options.timeout_seconds
        try:
            message = await self._answer(request, limit, grace_seconds=GRACE_SECONDS if self._asynchronous else 0.0)
        except asyncio.CancelledError:
            self.kill()
            raise
        if isinstance(message, Failure) and message.number == self._number:
            raise RewardError(message.message, traceback=message.traceback)
        if not isinstance(message, Answer) or message.number != self._number:
            raise self._end("sent an invalid answer")
        if len(message.values) != len(completions.texts):
            raise self._end("sent an invalid answer")
        if any(value is not None and too_large(value) for value in message.values):
            raise self._end("sent an invalid answer")
        return message.values

    @property
    def alive(self) -> bool:
        """Whether the process runs. Reaps a process that has ended."""
        return self._process.poll() is None

    def leave(self) -> None:
        """Let an idle process exit by itself: it reads the end of its socket."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kill the process and the children that it left behind."""
        with suppress(ProcessLookupError, PermissionError):  # no process is left; macOS: only zombies are left
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
            threading.Thread(target=self._process.wait, name="reward-reaper", daemon=True).start()

    def _end(self, reason: str) -> WorkerEnded:
        """Kill the process, and return the error."""
        self._read_output()
        self.kill()
        return WorkerEnded(f"reward {self._function.name} {reason}")

    async def _answer(self, request: bytes, limit_seconds: float, *, grace_seconds: float = 0.0) -> WorkerMessage:
        """Send the request and wait for a message, within the time and memory limits. Raises WorkerEnded."""
        deadline = self._loop.time() + limit_seconds + grace_seconds
        receiving = asyncio.ensure_future(self._exchange(request))
        try:
            while True:
                left = deadline - self._loop.time()
                await asyncio.wait({receiving}, timeout=max(0.0, min(POLL_SECONDS, left)))
                if receiving.done():
                    return receiving.result()
                if left <= 0:
                    raise self._end(f"took longer than {limit_seconds:g} s")
                if not self.alive:
                    await asyncio.wait({receiving}, timeout=POLL_SECONDS)  # an answer may have arrived before the end
                    if not receiving.done():
                        raise self._end(self._how_it_ended())
                if self._resident_bytes() > self._function.memory_bytes:
                    limit = self._function.memory_bytes // 2**20
                    raise self._end(f"used more than {limit} MB of memory (rewards.memory_limit_mb)")
        except (EOFError, OSError):
            await self._wait_for_exit()
            raise self._end(self._how_it_ended()) from None
        except msgspec.MsgspecError:
            raise self._end("sent an invalid answer") from None
        finally:
            receiving.cancel()

    async def _exchange(self, request: bytes) -> WorkerMessage:
        await self._loop.sock_sendall(self._socket, request)
        size = int.from_bytes(await self._receive(LENGTH_BYTES), "little")
        if size > MAX_ANSWER_BYTES:
            raise msgspec.ValidationError("the answer is too long")
        message: WorkerMessage = msgpack.decode(await self._receive(size), type=WorkerMessage)
        return message

    async def _receive(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            if not (chunk := await self._loop.sock_recv(self._socket, size - len(content))):
                raise EOFError
            content += chunk
        return bytes(content)

    async def _wait_for_exit(self) -> None:
        deadline = self._loop.time() + EXIT_SECONDS
        while self.alive and self._loop.time() < deadline:  # noqa: ASYNC110  (the system has no event for it)
            await asyncio.sleep(EXIT_SECONDS / 100)

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        if status is None or status == CONNECTION_LOST:
            return "closed the connection of its process"
        if status < 0:
            return f"ended its process with signal {_signal_name(-status)}"
        return f"ended its process with exit status {status}"

    def _resident_bytes(self) -> int:
        import psutil  # only calls that take longer than `POLL_SECONDS` need it

        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

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


class WorkerPool:
    """The worker processes of one reward function. Every call uses one of them for itself.

    group: parameters of a function of a group; None for other functions, and before the first process is ready.

    A further process starts when a call has waited for as long as a start takes, up to `max_workers`. A process that
    ends is replaced, unless `MAX_ENDED` have ended within `WINDOW_SECONDS`.
    """

    def __init__(self, function: ProcessFunction, *, max_workers: int) -> None:
        self.names: tuple[str, ...] = (function.name,)
        self.group: GroupParameters | None = None
        self._function, self._name, self._max_workers = function, function.name, max_workers
        self._output = OutputLog(function.name)
        self._workers: set[WorkerProcess] = set()
        self._idle: list[WorkerProcess] = []
        self._waiting: deque[asyncio.Future[WorkerProcess]] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._start_seconds = 0.0
        self._ended: deque[float] = deque()
        self._closed = False

    async def start(self) -> None:
        """Start the first process and wait until it is ready. Raises ProfileError if the function cannot be used."""
        try:
            self._idle.append(await self._new_worker())
        except WorkerEnded as error:
            raise ProfileError(f"rewards.name {self._name!r} cannot be imported: {error}") from None

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value of the function for every completion. Raises RewardError."""
        worker = await self._acquire()
        self._output.begin()
        try:
            values = await worker.call(completions)
        except WorkerEnded as error:
            self._workers.discard(worker)
            self._count_end(str(error))
            raise
        except asyncio.CancelledError:
            self._workers.discard(worker)
            raise
        except RewardError:
            self._release(worker)
            raise
        self._release(worker)
        return [values]

    def close(self) -> None:
        """End all processes. Idle ones have `EXIT_SECONDS` to exit by themselves."""
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
        for worker in self._idle:
            worker.leave()
        deadline = time.monotonic() + EXIT_SECONDS
        while any(worker.alive for worker in self._idle) and time.monotonic() < deadline:
            time.sleep(EXIT_SECONDS / 200)
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._idle.clear()

    async def _acquire(self) -> WorkerProcess:
        """Wait for an idle process, and start another one if that takes long. Raises RewardError."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._workers.discard(worker)
            worker.kill()
            self._count_end(f"reward {self._name} ended its process between two calls")
        waiter: asyncio.Future[WorkerProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        if not self._workers:
            self._grow()
        try:
            while True:
                await asyncio.wait({waiter}, timeout=max(POLL_SECONDS, self._start_seconds))
                if waiter.done():
                    return waiter.result()
                self._grow()
        finally:
            if not waiter.done():
                waiter.cancel()

    def _release(self, worker: WorkerProcess) -> None:
        """Give a process to the call that waits longest."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    def _grow(self) -> None:
        """Start another process in the background, unless one starts already or no more are allowed."""
        if self._starting is not None or self._closed or len(self._workers) >= self._max_workers:
            return
        if self._too_many_ended():
            if not self._workers:
                self._fail_all(
                    f"reward {self._name} was not called: {len(self._ended)} of its processes ended within "
                    f"{WINDOW_SECONDS:g} s"
                )
            return
        self._starting = asyncio.create_task(self._add())

    async def _add(self) -> None:
        try:
            self._release(await self._new_worker())
        except (WorkerEnded, ProfileError) as error:
            self._ended.append(time.monotonic())
            if not self._workers:
                self._fail_all(f"reward {self._name} cannot be started again: {error}")
        finally:
            self._starting = None

    async def _new_worker(self) -> WorkerProcess:
        """Start a process and wait until it is ready. Raises ProfileError or WorkerEnded."""
        began = time.monotonic()
        try:
            worker = WorkerProcess(self._function, on_output=self._output.add)
        except OSError as error:
            raise WorkerEnded(f"reward {self._name} has no process: {error.strerror or error}") from error
        self._workers.add(worker)
        try:
            await worker.ready()
        except BaseException:
            self._workers.discard(worker)
            worker.kill()
            raise
        self._start_seconds, self.group = time.monotonic() - began, worker.group
        return worker

    def _count_end(self, reason: str) -> None:
        """Count a process that ended, and replace it."""
        log.warning("reward_process_ended", reason=reason)
        self._ended.append(time.monotonic())
        if self._waiting or not self._workers:
            self._grow()

    def _too_many_ended(self) -> bool:
        while self._ended and self._ended[0] < time.monotonic() - WINDOW_SECONDS:
            self._ended.popleft()
        return len(self._ended) >= MAX_ENDED

    def _fail_all(self, reason: str) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(RewardError(reason))


class OutputLog:
    """What a function prints, as events `reward_output` in the event log. Output before the first call is kept."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._partial = b""
        self._held: list[bytes] | None = []
        self._lines = 0

    def add(self, content: bytes) -> None:
        """Add output of any process of the function."""
        *lines, rest = (self._partial + content).split(b"\n")
        self._partial = rest[:MAX_LINE_CHARACTERS]
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
        if number <= MAX_OUTPUT_LINES:
            text = line[:MAX_LINE_CHARACTERS].decode(errors="replace")
            log.info("reward_output", reward=self._name, line=text)
        else:
            log.warning("reward_output_suppressed", reward=self._name, after_lines=MAX_OUTPUT_LINES)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
