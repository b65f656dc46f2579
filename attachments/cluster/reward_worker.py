"""One reward worker on the cluster as the run sees it: an actor of Ray that computes one reward function."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from attachments.cluster.connection import RayConnection
from attachments.cluster.messages import Ended, RewardFunction, RewardMessage, RewardReply
from attachments.cluster.reward_process import RewardProcess
from attachments.remote.server import STATE_SECONDS
from clotho.rewards.registry import GroupParameters, built_in, split_name
from clotho.rewards.values import Completions, RewardError, Values, too_large
from protocols.errors import ProfileError, visible
from training_run.rewards.worker import Answer, Failure, Ready, Refused
from training_run.rewards.worker_process import (
    ProcessFunction,
    Worker,
    WorkerEnded,
    WorkerLost,
)
from training_run.supervision.guarded_process import GRACE_SECONDS, IMPORT_SECONDS

HEARTBEAT_SECONDS = 1.0
"""Pause between two questions whether the actor of a running call still answers."""


class ClusterRewards:
    """Starts reward workers on a cluster: the `NewWorker` of functions with `where = "cluster"`."""

    def __init__(self, connection: RayConnection) -> None:
        self._connection = connection

    def __call__(self, function: ProcessFunction, *, on_output: Callable[[bytes], None], further: bool) -> Worker:
        """Return a worker, whose actor starts when the pool waits until it is ready.

        The first worker of a function reserves no processor, so that each function has a worker on the smallest
        cluster. Further ones reserve one processor each.
        """
        return RewardWorker(self._connection, function, on_output=on_output, num_cpus=float(further))


class RewardWorker:
    """A worker. group: parameters of a function of a group, once the worker is ready.

    A call whose actor has ended, or does not answer for `STATE_SECONDS`, raises WorkerLost.
    """

    def __init__(
        self,
        connection: RayConnection,
        function: ProcessFunction,
        *,
        on_output: Callable[[bytes], None],
        num_cpus: float,
    ) -> None:
        self._connection, self._function, self._on_output = connection, function, on_output
        self._num_cpus = num_cpus
        self._actor: Any = None
        self._ended = False
        self.group: GroupParameters | None = None

    async def ready(self) -> None:
        """Start the actor, and wait until it has imported the function.

        Raises ProfileError if there is no cluster or the function cannot be used there, and WorkerEnded.
        """
        await self._connection.connect()
        self._actor = await self._connection.new_actor(
            RewardProcess, self._encoded(), num_cpus=self._num_cpus, scheduling_strategy="SPREAD"
        )
        message = await self._answer(self._actor.ready.remote(), IMPORT_SECONDS, watched=False)
        if isinstance(message, Refused):
            raise ProfileError(visible(message.message, 1000))
        if not isinstance(message, Ready):
            raise self._invalid()
        self.group = message.group

    async def call(self, completions: Completions) -> Values:
        """Return the values of the function. Raises RewardError, and WorkerEnded if the worker cannot be used again.

        A cancelled call ends the worker.
        """
        if self.group is None or not self.group.accepts("completion_ids"):
            completions = replace(completions, tokens=())
        limit = self._function.options.timeout_seconds + GRACE_SECONDS + STATE_SECONDS
        try:
            message = await self._answer(self._actor.call.remote(msgspec.msgpack.encode(completions)), limit)
        except asyncio.CancelledError:
            self.kill()
            raise
        if isinstance(message, Failure):
            raise RewardError(message.message, traceback=message.traceback)
        if not isinstance(message, Answer) or len(message.values) != len(completions.texts):
            raise self._invalid()
        if any(value is not None and too_large(value) for value in message.values):
            raise self._invalid()
        return message.values

    @property
    def alive(self) -> bool:
        """Whether the worker can be called, as far as the run knows."""
        return not self._ended

    def leave(self) -> None:
        """End the worker."""
        self.kill()

    def kill(self) -> None:
        """End the worker."""
        if self._actor is not None and not self._ended:
            self._connection.end_actor(self._actor)
        self._ended = True

    def _encoded(self) -> bytes:
        """The function, with the content of its file unless the module must be installed on the machine."""
        function, content = self._function, None
        if (file := source_file(function.name)) is not None:
            with suppress(OSError):  # the worker reports that it cannot import the file
                content = Path(file).read_bytes()
        return msgspec.msgpack.encode(
            RewardFunction(
                name=function.name,
                options=function.options,
                memory_bytes=function.memory_bytes,
                file_name=file.name if file else "",
                source=content,
            )
        )

    def _invalid(self) -> WorkerEnded:
        self.kill()
        return WorkerEnded(f"reward {self._function.name} sent an invalid answer")

    async def _answer(self, reply: Any, limit_seconds: float, *, watched: bool = True) -> RewardMessage:
        """Wait for a reply, and give its output to the pool. watched: ask meanwhile whether the actor answers.

        Raises WorkerEnded, and WorkerLost.
        """
        from ray.exceptions import RayError, RayTaskError

        name = self._function.name
        try:
            content = await self._wait(asyncio.wrap_future(reply.future()), limit_seconds, watched=watched)
            found = msgspec.msgpack.decode(content, type=RewardReply)
        except RayTaskError as error:
            self.kill()
            raise WorkerEnded(f"reward {name}: {visible(str(error.cause or error), 300)}") from error
        except (TimeoutError, RayError) as error:
            self.kill()
            raise WorkerLost(f"reward {name} lost its worker: {_line(error)}") from error
        except (ValueError, TypeError):
            raise self._invalid() from None
        if found.output:
            self._on_output(found.output)
        if isinstance(found.message, Ended):
            self.kill()
            raise WorkerEnded(found.message.message)
        return found.message

    async def _wait(self, reply: asyncio.Future[bytes], limit_seconds: float, *, watched: bool) -> bytes:
        try:
            async with asyncio.timeout(limit_seconds):
                while not (await asyncio.wait({reply}, timeout=HEARTBEAT_SECONDS))[0]:
                    if watched:
                        async with asyncio.timeout(STATE_SECONDS):
                            await asyncio.wrap_future(self._actor.ping.remote().future())
        except TimeoutError:
            if not reply.done():
                raise TimeoutError("it does not answer") from None
        finally:
            reply.cancel()
        return reply.result()


def _line(error: Exception) -> str:
    text = str(error).splitlines()
    return visible(text[0] if text else type(error).__name__, 200)


def source_file(name: str) -> Path | None:
    """Return the Python file of a function: that of its name, or the module's file in the current directory.

    None for built-in functions, packages, and modules that Python finds elsewhere. Raises ProfileError if the name is
    malformed.
    """
    if name in built_in():
        return None
    module_name, _ = split_name(name)
    if module_name.endswith(".py"):
        return Path(module_name).expanduser()
    here = Path.cwd()
    found = PathFinder.find_spec(module_name, [*sys.path, str(here)]) if "." not in module_name else None
    file = Path(found.origin) if found is not None and found.origin is not None else None
    return file if file is not None and file.suffix == ".py" and file.parent == here else None
