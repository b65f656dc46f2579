"""The worker process of a reward function: imports the function, and answers one call at a time over a socket.

`worker_pool` starts `python -c BOOT SETTINGS` in a session of its own. A frame is four bytes with the length, little
endian, and one message as MessagePack. The worker sends `Ready` or `Refused`, then one `Answer` or `Failure` for each
`CallRequest`. It ends when the socket closes, and when its parent process ends.

A synchronous function is called in the main thread. An asynchronous function is called in an event loop that exists for
the life of the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import fcntl
import os
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TypeVar

import msgspec
from msgspec import Struct, msgpack

from clotho.rewards.registry import GroupParameters, RewardOptions, group_parameters, is_async, load_reward
from clotho.rewards.values import Completions, Reward, RewardError, Values, await_all, call_all
from protocols.errors import ProfileError

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from training_run.rewards.worker import main; main(sys.argv[1])"
)
"""Program of the worker. The path must be set before the first import of the project."""

CONNECTION_LOST = 97
"""Exit status of a worker whose socket was closed by its own function."""

ORPHAN_SECONDS = 5.0
"""Time from the time limit of a call to the end of a process that nobody ended."""

LENGTH_BYTES = 4
LOWEST_DESCRIPTOR = 200
"""The socket has a high number, so that a file opened by the function does not take its place."""

PARENT_POLL_SECONDS = 0.5

PR_SET_CHILD_SUBREAPER = 36
"""Option of `prctl`: Linux makes this process the parent of descendants whose parent has ended."""


Request = TypeVar("Request")


class ProcessSettings(Struct, frozen=True, kw_only=True):
    """Parent -> process that runs code of the user, in the command line.

    path: `sys.path`. parent: process id. memory_bytes: limit of the private memory; Linux enforces it, macOS does not.
    descriptor: of the socket.
    """

    path: list[str]
    parent: int
    memory_bytes: int
    descriptor: int = -1


class WorkerSettings(ProcessSettings, frozen=True, kw_only=True):
    """Parent -> worker. name: of the function. options: what it is loaded with. file: as of `load_reward`."""

    name: str
    options: RewardOptions
    file: str = ""


class CallRequest(Struct, frozen=True, kw_only=True):
    """Parent -> worker. number: serial number of the call."""

    number: int
    completions: Completions


class Ready(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The function is imported. group: parameters of a function of a group."""

    asynchronous: bool
    group: GroupParameters | None


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The function cannot be used; `message` is the text of the ProfileError."""

    message: str


class Answer(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The values of a call."""

    number: int
    values: Values


class Failure(Struct, frozen=True, kw_only=True, tag=True):
    """Worker -> parent. The call failed. message: text of the RewardError. traceback: of the function's exception."""

    number: int
    message: str
    traceback: str = ""


WorkerMessage = Ready | Refused | Answer | Failure


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


def main(settings_json: str) -> None:
    """Serve calls until the parent closes the socket."""
    settings = msgspec.json.decode(settings_json, type=WorkerSettings)
    process = os.getpid()
    guard(settings)
    channel = WorkerChannel(settings.descriptor)
    try:
        function = load_reward(settings.name, settings.options, file=settings.file)
    except ProfileError as error:
        _exit_if_forked(process)
        channel.send(Refused(message=str(error)))
        return
    _exit_if_forked(process)
    group, asynchronous = group_parameters(function), is_async(function)
    reward = Reward(name=settings.name, function=function, group=group, max_steps=settings.options.max_steps)
    channel.send(Ready(asynchronous=asynchronous, group=group))
    if asynchronous:
        asyncio.run(_serve_asynchronous(channel, reward, settings.options.timeout_seconds))
    else:
        _serve(channel, reward, settings.options.timeout_seconds)
    end_descendants(process)


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


def _exit_if_forked(process: int) -> None:
    if os.getpid() != process:
        os._exit(0)


def _serve(channel: WorkerChannel, reward: Reward, timeout_seconds: float) -> None:
    with open(os.devnull, "w") as nowhere:
        while (call := channel.receive(CallRequest)) is not None:
            # Ends a process that holds the GIL forever and has lost its parent; it needs no GIL itself.
            faulthandler.dump_traceback_later(timeout_seconds + ORPHAN_SECONDS, exit=True, file=nowhere)
            channel.send(_answer(reward, call))
            faulthandler.cancel_dump_traceback_later()


def _answer(reward: Reward, call: CallRequest) -> Answer | Failure:
    try:
        return Answer(number=call.number, values=call_all(reward, call.completions))
    except RewardError as error:
        return Failure(number=call.number, message=str(error), traceback=error.traceback)


async def _serve_asynchronous(channel: WorkerChannel, reward: Reward, timeout_seconds: float) -> None:
    """Serve calls in an event loop, which also runs between calls."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    while True:
        arrived.clear()
        loop.add_reader(channel.descriptor, arrived.set)
        await arrived.wait()
        loop.remove_reader(channel.descriptor)
        if (call := channel.receive(CallRequest)) is None:
            return
        channel.send(await _answer_asynchronous(reward, call, timeout_seconds))


async def _answer_asynchronous(reward: Reward, call: CallRequest, timeout_seconds: float) -> Answer | Failure:
    try:
        async with asyncio.timeout(timeout_seconds):
            return Answer(number=call.number, values=await await_all(reward, call.completions))
    except TimeoutError:
        return Failure(number=call.number, message=f"reward {reward.name} took longer than {timeout_seconds:g} s")
    except RewardError as error:
        return Failure(number=call.number, message=str(error), traceback=error.traceback)
