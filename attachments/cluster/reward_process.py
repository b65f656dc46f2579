"""The process of a reward worker: an asynchronous actor of Ray around one worker process of a reward function.

The function runs in a child process with the limits of every worker process, so that whatever the function does ends
the child and not the actor.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from attachments.cluster.messages import Ended, RewardFunction, RewardMessage, RewardReply
from clotho.rewards.values import Completions, RewardError
from protocols.errors import ProfileError
from training_run.rewards.worker import Answer, Failure, Ready, Refused
from training_run.rewards.worker_process import ProcessFunction, WorkerEnded, WorkerProcess

MAX_OUTPUT_BYTES = 65_536
"""Output of the function that one reply contains; the rest is dropped."""


class RewardProcess:
    """Computes one reward function, for one call at a time. All messages are msgpack."""

    def __init__(self, function: bytes) -> None:
        """function: `RewardFunction`."""
        self._function = msgspec.msgpack.decode(function, type=RewardFunction)
        self._output = bytearray()
        self._calls = 0
        self._process: WorkerProcess | None = None

    async def ready(self) -> bytes:
        """Import the function; return a `RewardReply` with `Ready`, `Refused` or `Ended`."""
        try:
            if self._function.source is None:
                message = await self._start("")
            else:  # further modules that the function imports must be installed
                with tempfile.TemporaryDirectory(prefix="clotho-reward-") as directory:
                    message = await self._start(_copy(directory, self._function.file_name, self._function.source))
        except OSError as error:
            message = Ended(message=f"reward {self._function.name} has no process: {error.strerror or error}")
        return self._reply(message)

    async def call(self, completions: bytes) -> bytes:
        """Score a group, `Completions`; return a `RewardReply` with `Answer`, `Failure` or `Ended`."""
        self._calls += 1
        group = msgspec.msgpack.decode(completions, type=Completions)
        assert self._process is not None
        message: RewardMessage
        try:
            message = Answer(number=self._calls, values=await self._process.call(group))
        except WorkerEnded as error:
            message = Ended(message=str(error))
        except RewardError as error:
            message = Failure(number=self._calls, message=str(error), traceback=error.traceback)
        return self._reply(message)

    async def ping(self) -> None:
        """Answer."""

    async def _start(self, file: str) -> RewardMessage:
        function = ProcessFunction(
            name=self._function.name,
            options=self._function.options,
            memory_bytes=self._function.memory_bytes,
            file=file,
        )
        self._process = WorkerProcess(function, on_output=self._keep)
        try:
            await self._process.ready()
        except ProfileError as error:
            return Refused(message=str(error))
        except WorkerEnded as error:
            return Ended(message=str(error))
        return Ready(asynchronous=self._process.asynchronous, group=self._process.group)

    def _keep(self, output: bytes) -> None:
        self._output += output[: MAX_OUTPUT_BYTES - len(self._output)]

    def _reply(self, message: RewardMessage) -> bytes:
        output, self._output = bytes(self._output), bytearray()
        return msgspec.msgpack.encode(RewardReply(message=message, output=output))


def _copy(directory: str, name: str, content: bytes) -> str:
    file = Path(directory, name)
    file.write_bytes(content)
    return str(file)
