"""The worker processes of an environment, and the episodes that they lead."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import Any

import structlog
from msgspec import msgpack

from attachments.agents.messages import (
    Answer,
    Begin,
    Continue,
    Describe,
    Described,
    EnvironmentSettings,
    Forget,
    Loaded,
    Request,
)
from attachments.agents.sections import PythonAgent
from protocols.errors import ProfileError
from protocols.prompt import Problem
from training_run.episodes.messages import Ask, Event, Failed, PolicyTurn
from training_run.supervision.guarded_process import (
    GRACE_SECONDS,
    IMPORT_SECONDS,
    GuardedProcess,
    OutputLog,
    frame,
    python_module,
)

ANSWERS: Any = Answer
MAX_REPLAYS = 3
"""How often an episode may lose its worker to other episodes."""

log = structlog.get_logger(__name__)


class EnvironmentEnded(Exception):
    """The worker process ended, or was killed at a limit. It cannot be used again."""


class WorkerGone(Exception):
    """The worker had ended before a request, because of another episode."""


class EnvironmentWorker:
    """One worker process, which answers one request at a time.

    episodes: number of episodes that it leads. ended: it takes no more requests.
    """

    def __init__(self, settings: PythonAgent, output: OutputLog) -> None:
        """Start the process. Raises OSError if the system refuses."""
        limits = EnvironmentSettings(
            memory_bytes=settings.memory_limit_mb * 2**20,
            environment=settings.environment,
            step_seconds=settings.step_seconds,
        )
        self.process = GuardedProcess(
            "the environment",
            python_module("attachments.agents.worker"),
            limits,
            limit_key="agent.memory_limit_mb",
            ended=EnvironmentEnded,
            on_output=output.add,
        )
        self.episodes, self.ended = 0, False
        self._seconds = settings.step_seconds
        self._turn = asyncio.Lock()
        self._loaded = False

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request. Raises EnvironmentEnded, and WorkerGone if the process had ended before."""
        async with self._turn:
            if self.ended or not self.process.alive:
                raise WorkerGone
            try:
                if not self._loaded:
                    await self._load()
                limit = IMPORT_SECONDS if isinstance(request, Describe) else self._seconds
                found: Answer = await self.process.answer(frame(request), ANSWERS, limit, grace_seconds=GRACE_SECONDS)
            except BaseException:
                self.ended = True
                raise
            return found

    async def _load(self) -> None:
        found = await self.process.answer(b"", ANSWERS, IMPORT_SECONDS)
        if isinstance(found, Failed):
            self.process.kill()
            raise ProfileError(found.message)
        if not isinstance(found, Loaded):
            raise self.process.end("sent an invalid answer")
        self._loaded = True


class Workers:
    """The workers of an environment. A new episode gets the one with the fewest, or a further one up to `max_workers`.

    A worker that ends takes its episodes with it. The one that it computed has failed. The others are begun again in
    another worker with the same messages of the policy; an environment that then answers otherwise has failed.
    """

    def __init__(self, settings: PythonAgent) -> None:
        self._settings = settings
        self._output = OutputLog("environment", settings.environment)
        self._workers: list[EnvironmentWorker] = []
        self._numbers = count()

    async def described(self) -> Described:
        """Return the tools and the needed columns. Raises ProfileError if the environment cannot be used."""
        try:
            found = await self.worker().answer(Describe())
        except EnvironmentEnded as error:
            raise ProfileError(
                f"agent.environment {self._settings.environment!r} cannot be imported: {error}"
            ) from None
        if not isinstance(found, Described):
            reason = found.message if isinstance(found, Failed) else "it sent an invalid answer"
            raise ProfileError(f"agent.environment {self._settings.environment!r}: {reason}")
        return found

    def episode(self, problem: Problem) -> EnvironmentEpisode:
        """Return an episode that has not begun."""
        self._output.begin()
        return EnvironmentEpisode(self, next(self._numbers), problem)

    def worker(self) -> EnvironmentWorker:
        """Return the worker for another episode. Raises EnvironmentEnded if the system starts no process."""
        self._workers = [worker for worker in self._workers if not worker.ended]
        idle = min(self._workers, key=lambda worker: worker.episodes, default=None)
        if idle is not None and (not idle.episodes or len(self._workers) >= self._settings.max_workers):
            return idle
        try:
            self._workers.append(EnvironmentWorker(self._settings, self._output))
        except OSError as error:
            raise EnvironmentEnded(f"the environment has no process: {error.strerror or error}") from error
        return self._workers[-1]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.kill()


class EnvironmentEpisode:
    """One episode: asks of the environment, and messages of the policy."""

    def __init__(self, workers: Workers, number: int, problem: Problem) -> None:
        self._workers, self._number, self._problem = workers, number, problem
        self._worker: EnvironmentWorker | None = None
        self._turns: list[PolicyTurn] = []
        self._asks: list[Event] = []

    async def begin(self) -> Event:
        """Return what the environment does first."""
        self._asks.append(found := await self._guarded(Begin(number=self._number, problem=self._problem)))
        return found

    async def go_on(self, turn: PolicyTurn) -> Event:
        """Pass a message of the policy on; return what the environment does next."""
        request = Continue(number=self._number, turn=turn)
        found = await self._guarded(request)
        self._turns.append(turn)
        self._asks.append(found)
        return found

    async def close(self) -> None:
        """Let the worker forget the episode."""
        worker = self._leave()
        if worker is not None and isinstance(self._asks[-1] if self._asks else None, Ask):
            with suppress(EnvironmentEnded, WorkerGone):
                await worker.answer(Forget(number=self._number))

    def _leave(self) -> EnvironmentWorker | None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.episodes -= 1
        return worker

    async def _guarded(self, request: Request) -> Event:
        for _ in range(1 + MAX_REPLAYS):
            try:
                if self._worker is None and (failure := await self._replay()) is not None:
                    return failure
                assert self._worker is not None
                found = await self._worker.answer(request)
                return Failed(message="it sent an invalid answer") if isinstance(found, Loaded | Described) else found
            except WorkerGone:
                self._leave()
            except (EnvironmentEnded, ProfileError) as error:
                log.warning("environment_ended", reason=str(error))
                return Failed(message=str(error))
        return Failed(message=f"{MAX_REPLAYS} of its workers ended because of other episodes")

    async def _replay(self) -> Failed | None:
        """Get a worker, and bring it to where the episode is. Returns why the environment cannot go on."""
        self._worker = self._workers.worker()
        self._worker.episodes += 1
        for position, expected in enumerate(self._asks):
            turn = self._turns[position - 1] if position else None
            request = Begin(number=self._number, problem=self._problem)
            found = await self._worker.answer(request if turn is None else Continue(number=self._number, turn=turn))
            if msgpack.encode(found) != msgpack.encode(expected):
                return Failed(message="its worker ended because of another episode, and it does not repeat its answers")
        return None
