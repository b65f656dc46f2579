"""One worker process of a reward function: start, calls, time and memory limits, and its end.

A function of the user may crash, hold the GIL, fork, close descriptors, send signals or use all memory. In a process of
its own, each of these costs one call: the process is killed, and `worker_pool` replaces it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct, msgpack
from msgspec.structs import replace

from clotho.rewards.registry import GroupParameters, RewardOptions
from clotho.rewards.values import Completions, RewardError, Values, too_large
from protocols.errors import ProfileError
from training_run.rewards.worker import (
    BOOT,
    CONNECTION_LOST,
    LENGTH_BYTES,
    Answer,
    CallRequest,
    Failure,
    ProcessSettings,
    Ready,
    Refused,
    WorkerMessage,
    WorkerSettings,
    end_descendants,
    frame,
)

Message = TypeVar("Message")
MESSAGES: Any = WorkerMessage

IMPORT_SECONDS = 300.0
"""Time limit for the start of a worker, which imports the user's module."""

POLL_SECONDS = 0.1
"""Interval of the checks whether the process of a running call is alive and within its memory limit."""

EXIT_SECONDS = 1.0
"""Time for a worker to exit by itself."""

GRACE_SECONDS = 1.0
"""Time for an asynchronous function to be cancelled at its time limit."""

MAX_ANSWER_BYTES = 2**20

OUTPUT_BYTES = 65_536
OUTPUT_PAUSE_SECONDS = 0.05
"""At most `OUTPUT_BYTES` are read at once, with this pause. A function that prints faster waits."""


class WorkerEnded(RewardError):
    """The worker process ended, or was killed at a limit. It cannot be used again."""


class WorkerLost(WorkerEnded):
    """The machine of the worker left or does not answer. The function has no part in it, and the call is repeated."""


class ProcessFunction(Struct, frozen=True, kw_only=True):
    """A function in worker processes. The time limit of the options is that of a call, which scores one group.

    file: as of `load_reward`.
    """

    name: str
    options: RewardOptions
    memory_bytes: int
    file: str = ""


class Worker(Protocol):
    """A process that answers one call at a time, on this machine or on another one.

    group: parameters of a function of a group, once the worker is ready; None for other functions.
    """

    group: GroupParameters | None

    async def ready(self) -> None:
        """Wait until the function is imported. Raises ProfileError if it cannot be used, and WorkerEnded."""

    async def call(self, completions: Completions) -> Values:
        """Return the values of the function. Raises RewardError, and WorkerEnded if the worker cannot be used again.

        A cancelled call ends the worker.
        """

    @property
    def alive(self) -> bool:
        """Whether the worker can be called."""
        ...

    def leave(self) -> None:
        """Let an idle worker end."""

    def kill(self) -> None:
        """End the worker."""


class NewWorker(Protocol):
    """Starts workers of functions."""

    def __call__(self, function: ProcessFunction, *, on_output: Callable[[bytes], None], further: bool) -> Worker:
        """Start a worker. further: the pool has other workers. Raises OSError if the system refuses."""


def new_process(function: ProcessFunction, *, on_output: Callable[[bytes], None], further: bool) -> Worker:
    """Start a worker process on this machine. Raises OSError if the system refuses."""
    return WorkerProcess(function, on_output=on_output)


class GuardedProcess:
    """A process that runs code of the user: its start, its answers within limits, its output, and its end."""

    def __init__(
        self, name: str, boot: str, settings: ProcessSettings, *, limit_key: str, on_output: Callable[[bytes], None]
    ) -> None:
        """Start the process. Needs a running event loop. Raises OSError if the system refuses.

        name: in errors, such as `reward length`. boot: program, whose argument are the settings with the descriptor of
        its socket. limit_key: setting of the memory limit.
        """
        self._name, self._limit_key, self._on_output = name, limit_key, on_output
        self._memory_bytes = settings.memory_bytes
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._output, their_output = os.pipe()
        os.set_blocking(self._output, False)
        argument = msgspec.json.encode(replace(settings, descriptor=theirs.fileno())).decode()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot, argument],
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

    def end(self, reason: str) -> WorkerEnded:
        """Kill the process, and return the error."""
        self._read_output()
        self.kill()
        return WorkerEnded(f"{self._name} {reason}")

    async def answer(
        self, request: bytes, kind: type[Message], limit_seconds: float, *, grace_seconds: float = 0.0
    ) -> Message:
        """Send the request and wait for a message of this kind, within the time and memory limits. Raises WorkerEnded.

        A cancelled wait kills the process.
        """
        deadline = self._loop.time() + limit_seconds + grace_seconds
        receiving = asyncio.ensure_future(self._exchange(request, kind))
        try:
            while True:
                left = deadline - self._loop.time()
                await asyncio.wait({receiving}, timeout=max(0.0, min(POLL_SECONDS, left)))
                if receiving.done():
                    return receiving.result()
                if left <= 0:
                    raise self.end(f"took longer than {limit_seconds:g} s")
                if not self.alive:
                    await asyncio.wait({receiving}, timeout=POLL_SECONDS)  # an answer may have arrived before the end
                    if not receiving.done():
                        raise self.end(self._how_it_ended())
                if self._resident_bytes() > self._memory_bytes:
                    limit = self._memory_bytes // 2**20
                    raise self.end(f"used more than {limit} MB of memory ({self._limit_key})")
        except asyncio.CancelledError:
            self.kill()
            raise
        except (EOFError, OSError):
            await self._wait_for_exit()
            raise self.end(self._how_it_ended()) from None
        except ValueError:
            raise self.end("sent an invalid answer") from None
        finally:
            receiving.cancel()

    async def _exchange(self, request: bytes, kind: type[Message]) -> Message:
        await self._loop.sock_sendall(self._socket, request)
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


class WorkerProcess:
    """One worker process of a reward function on this machine. asynchronous: whether the function is, once ready."""

    def __init__(self, function: ProcessFunction, *, on_output: Callable[[bytes], None]) -> None:
        """Start the process. Needs a running event loop. Raises OSError if the system refuses."""
        self._function = function
        self._number = 0
        self.asynchronous = False
        self.group: GroupParameters | None = None
        settings = WorkerSettings(
            name=function.name,
            options=function.options,
            path=sys.path,
            parent=os.getpid(),
            memory_bytes=function.memory_bytes,
            file=function.file,
        )
        self._process = GuardedProcess(
            f"reward {function.name}", BOOT, settings, limit_key="rewards.memory_limit_mb", on_output=on_output
        )
        self.leave, self.kill = self._process.leave, self._process.kill

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.alive

    async def ready(self) -> None:
        """Wait until the function is imported. Raises ProfileError if it cannot be used, and WorkerEnded."""
        message = await self._process.answer(b"", MESSAGES, IMPORT_SECONDS)
        if isinstance(message, Refused):
            self.kill()
            raise ProfileError(message.message)
        if not isinstance(message, Ready):
            raise self._process.end("sent an invalid answer")
        self.asynchronous, self.group = message.asynchronous, message.group

    async def call(self, completions: Completions) -> Values:
        """Return the values of the function. Raises RewardError, and WorkerEnded if the process cannot be used again.

        A cancelled call kills the process.
        """
        self._number += 1
        if self.group is None or not self.group.accepts("completion_ids"):
            completions = replace(completions, tokens=())
        request = frame(CallRequest(number=self._number, completions=completions))
        limit = self._function.options.timeout_seconds
        grace = GRACE_SECONDS if self.asynchronous else 0.0
        message = await self._process.answer(request, MESSAGES, limit, grace_seconds=grace)
        if isinstance(message, Failure) and message.number == self._number:
            raise RewardError(message.message, traceback=message.traceback)
        if not isinstance(message, Answer) or message.number != self._number:
            raise self._process.end("sent an invalid answer")
        if len(message.values) != len(completions.texts):
            raise self._process.end("sent an invalid answer")
        if any(value is not None and too_large(value) for value in message.values):
            raise self._process.end("sent an invalid answer")
        return message.values


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
