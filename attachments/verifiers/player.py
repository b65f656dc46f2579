"""The process that plays tasks, as the run sees it: one at a time, with any number of episodes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from itertools import count

import structlog

from attachments.verifiers.sections import TASKSET
from attachments.verifiers.tasks import (
    BeginTask,
    ContinueTask,
    ForgetTask,
    Forgotten,
    Numbered,
    TasksetLoaded,
    command,
    program,
    taskset_of,
)
from protocols.errors import ActorError, ProfileError
from protocols.prompt import Problem
from training_run.episodes.messages import Event, Failed, PolicyTurn
from training_run.profile.data import DataSection
from training_run.supervision.guarded_process import IMPORT_SECONDS, GuardedProcess, OutputLog, frame
from training_run.supervision.supervisor import RestartCounter, RestartPolicy

POLICY = RestartPolicy(max_restarts=9, first_pause_seconds=0.5, longest_pause_seconds=8.0)
"""Limits the restarts of a process that ends again and again."""

FORGET_SECONDS = 10.0
"""Time for a process to forget an episode that took too long; after it, the process hangs, and is killed."""

log = structlog.get_logger(__name__)


class PlayerEnded(Exception):
    """The process ended, or was killed at a limit. It cannot be used again."""


class TasksetProcess:
    """One process: sends requests, and passes events to episodes. ended: why it plays no more; empty: it does."""

    def __init__(self, data: DataSection, output: OutputLog) -> None:
        """Start the process. Raises OSError if the system refuses."""
        self.started, self.ended = time.monotonic(), ""
        self._process = GuardedProcess(
            f"the process of the taskset {taskset_of(data)}",
            command(data),
            program(data),
            limit_key="data.verifiers.memory_limit_mb",
            ended=PlayerEnded,
            on_output=output.add,
        )
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: dict[int, asyncio.Queue[Event | Forgotten]] = {}
        self._sending = asyncio.Lock()
        self._reading = asyncio.create_task(self._read())

    async def loaded(self) -> None:
        """Wait until the taskset is imported. Raises PlayerEnded."""
        async with asyncio.timeout(IMPORT_SECONDS):
            await asyncio.shield(self._loaded)

    def begin(self, number: int) -> None:
        """Expect events of an episode."""
        self._events[number] = asyncio.Queue()

    def forget(self, number: int) -> None:
        """Expect no more events of an episode."""
        self._events.pop(number, None)

    async def send(self, message: BeginTask | ContinueTask | ForgetTask) -> None:
        """Send a request. Raises PlayerEnded."""
        async with self._sending:
            if self.ended:
                raise PlayerEnded(self.ended)
            await self._process.send(frame(message))

    async def event(self, number: int) -> Event | Forgotten:
        """Wait for the next event of an episode; Failed if the process has ended."""
        if self.ended:
            return Failed(message=self.ended)
        return await self._events[number].get()

    def kill(self, reason: str) -> None:
        """End the process."""
        self._end(reason)
        self._process.kill()
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            while True:
                found = await self._process.receive(Numbered)
                if isinstance(found.event, TasksetLoaded):
                    self._loaded.set_result(None)
                elif (events := self._events.get(found.number)) is not None:
                    events.put_nowait(found.event)
        except PlayerEnded as error:
            self._end(str(error))
        finally:
            self._end("the run reads it no more")  # without effect if the reason is known

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = reason
        if not self._loaded.done():
            self._loaded.set_exception(PlayerEnded(reason))
            self._loaded.exception()  # the run may wait for it no more
        for events in self._events.values():
            events.put_nowait(Failed(message=reason))


class TasksetPlayer:
    """Plays the tasks of a taskset. A process that ends costs its episodes, and another one is started.

    Raises ProfileError if the taskset cannot be loaded, and ActorError if its process ends again and again.
    """

    def __init__(self, data: DataSection) -> None:
        self._data, self._seconds = data, TASKSET.of(data).step_seconds
        self._output = OutputLog("taskset", taskset_of(data))
        self._process: TasksetProcess | None = None
        self._restarts, self._starting = RestartCounter(POLICY), asyncio.Lock()
        self._numbers = count(1)

    async def start(self) -> None:
        """Start the process, and wait until the taskset is imported. Raises ProfileError."""
        try:
            await self.process()
        except (PlayerEnded, TimeoutError, OSError) as error:
            self.close()
            raise ProfileError(f"data.train {self._data.train}: {self._output.last_line or error}") from None

    def episode(self, problem: Problem) -> TasksetEpisode:
        """Return an episode that has not begun."""
        self._output.begin()
        return TasksetEpisode(self, next(self._numbers), problem, self._seconds)

    async def process(self) -> TasksetProcess:
        """Return the process; start another one if it has ended. Raises PlayerEnded, ActorError and OSError."""
        async with self._starting:
            last = self._process
            if last is not None and not last.ended:
                return last
            if last is not None:
                pause = self._restarts.next_pause(time.monotonic() - last.started)
                if pause is None:
                    raise ActorError(f"{last.ended}, {self._restarts.in_a_row} times in a row")
                log.warning("taskset_restarts", reason=last.ended, delay_seconds=pause)
                await asyncio.sleep(pause)
            self._process = found = TasksetProcess(self._data, self._output)
            await found.loaded()
            return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill("the run has ended")


class TasksetEpisode:
    """One episode of a task."""

    def __init__(self, player: TasksetPlayer, number: int, problem: Problem, seconds: float) -> None:
        self._player, self._number, self._problem, self._seconds = player, number, problem, seconds
        self._process: TasksetProcess | None = None

    async def begin(self) -> Event:
        """Return what the task does first."""
        try:
            self._process = await self._player.process()
        except (PlayerEnded, TimeoutError, OSError) as error:
            return Failed(message=str(error) or "the taskset is not imported in time")
        self._process.begin(self._number)
        return await self._next(BeginTask(number=self._number, task=self._problem.extra))

    async def go_on(self, turn: PolicyTurn) -> Event:
        """Pass a message of the policy on; return what the task does next."""
        return await self._next(ContinueTask(number=self._number, turn=turn))

    async def close(self) -> None:
        """Let the process forget the episode, if it has not ended there."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(PlayerEnded):
                await process.send(ForgetTask(number=self._number))
            process.forget(self._number)

    async def _next(self, request: BeginTask | ContinueTask) -> Event:
        process = self._process
        assert process is not None, "the episode has begun"
        try:
            await process.send(request)
        except PlayerEnded as error:
            return Failed(message=str(error))
        try:
            async with asyncio.timeout(self._seconds):
                found = await process.event(self._number)
        except TimeoutError:
            await self._give_up(process)
            return Failed(message=f"took longer than {self._seconds:g} s")
        return Failed(message="it was forgotten") if isinstance(found, Forgotten) else found

    async def _give_up(self, process: TasksetProcess) -> None:
        """Forget an episode that took too long. A process that does not answer hangs, and is killed."""
        try:
            async with asyncio.timeout(FORGET_SECONDS):
                await process.send(ForgetTask(number=self._number))
                while not isinstance(found := await process.event(self._number), Forgotten | Failed):
                    log.debug("taskset_late_event", kind=type(found).__name__)
        except TimeoutError:
            process.kill("the process of the taskset does not answer")
        except PlayerEnded:
            return
