"""One worker process of a reward function: start, calls, time and memory limits, and its end.

A function of the user may crash, hold the GIL, fork, close descriptors, send signals or use all memory. In a process of
its own, each of these costs one call: the process is killed, and `worker_pool` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from clotho.rewards.registry import GroupParameters, RewardOptions
from clotho.rewards.values import Completions, RewardError, Values, too_large
from protocols.errors import ProfileError
from training_run.rewards.worker import (
    Answer,
    CallRequest,
    Failure,
    Ready,
    Refused,
    WorkerMessage,
    WorkerSettings,
)
from training_run.supervision.guarded_process import GRACE_SECONDS, IMPORT_SECONDS, GuardedProcess, frame, python_module

MESSAGES: Any = WorkerMessage


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
            memory_bytes=function.memory_bytes,
            file=function.file,
        )
        self._process = GuardedProcess(
            f"reward {function.name}",
            python_module("training_run.rewards.worker"),
            settings,
            limit_key="rewards.memory_limit_mb",
            ended=WorkerEnded,
            on_output=on_output,
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
        if (
            not isinstance(message, Answer)
            or message.number != self._number
            or len(message.values) != len(completions.texts)
            or any(value is not None and too_large(value) for value in message.values)
        ):
            raise self._process.end("sent an invalid answer")
        return message.values
