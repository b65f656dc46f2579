"""The workers of a reward function: how many there are, which one a call gets, and what replaces one that ended.

A worker is a process of this machine (`worker_process`), or one on another machine
(`attachments.cluster.reward_worker`).

Why not a library: the workers of `pebble` and `loky` belong to the process group of the run, so a function that
signals its group ends the run. Children that a function forks outlive the pool. `loky` has no time limit that kills.
Both answer with pickles, which the run would execute. Here each worker has a session, a socket and an output pipe of
its own, and answers are validated MessagePack.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import structlog

from clotho.rewards.registry import GroupParameters
from clotho.rewards.values import Completions, RewardError, Values
from protocols.errors import ProfileError
from training_run.rewards.worker_process import (
    NewWorker,
    ProcessFunction,
    Worker,
    WorkerEnded,
    WorkerLost,
    new_process,
)
from training_run.supervision.guarded_process import EXIT_SECONDS, POLL_SECONDS, OutputLog

MAX_ENDED, WINDOW_SECONDS = 32, 600.0
"""Maximum number of workers of one function that end by a fault within the window. No more are started then."""

MAX_LOST, LOST_SECONDS = 5, 1.0
"""Number of workers that a group may lose, and the pause after a worker that was lost at its start."""

log = structlog.get_logger(__name__)


class WorkerPool:
    """The workers of one reward function. Every call uses one of them for itself.

    group: parameters of a function of a group; None for other functions, and before the first process is ready.

    The pool counts the time in which at least one call waits. When this time, since the last start, has reached the
    duration of a start, a further process starts, up to `max_workers`. A short queue that returns with every batch
    therefore gets more processes. A process that ends is replaced, unless `MAX_ENDED` have ended within
    `WINDOW_SECONDS`. A worker whose machine left does not count, and its group is scored again by another one.
    """

    def __init__(self, function: ProcessFunction, *, max_workers: int, new_worker: NewWorker = new_process) -> None:
        self.names: tuple[str, ...] = (function.name,)
        self.group: GroupParameters | None = None
        self._function, self._name, self._max_workers = function, function.name, max_workers
        self._start_worker = new_worker
        self._output = OutputLog("reward", function.name)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._start_seconds = 0.0
        self._waited_seconds, self._observed = 0.0, time.monotonic()
        self._ended: deque[float] = deque()
        self._closed = False

    async def start(self) -> None:
        """Start the first process and wait until it is ready. Raises ProfileError if the function cannot be used."""
        try:
            self._idle.append(await self._new_worker())
        except WorkerLost as error:
            raise ProfileError(f"rewards.name {self._name!r} cannot be computed on the cluster: {error}") from None
        except WorkerEnded as error:
            raise ProfileError(f"rewards.name {self._name!r} cannot be imported: {error}") from None

    async def __call__(self, completions: Completions) -> list[Values]:
        """Return the value of the function for every completion. Raises RewardError."""
        for _ in range(MAX_LOST):
            worker = await self._acquire()
            self._output.begin()
            try:
                return [await self._call(worker, completions)]
            except WorkerLost as loss:
                log.warning("reward_worker_lost", reward=self._name, reason=str(loss))
                lost = loss
        raise RewardError(f"reward {self._name} was not computed by {MAX_LOST} workers; the last one: {lost}")

    async def _call(self, worker: Worker, completions: Completions) -> Values:
        try:
            values = await worker.call(completions)
        except WorkerLost:
            self._workers.discard(worker)
            worker.kill()
            raise
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
        return values

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

    async def _acquire(self) -> Worker:
        """Wait for an idle process, and start another one if the waiting time requires it. Raises RewardError."""
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            self._workers.discard(worker)
            worker.kill()
            self._count_end(f"reward {self._name} ended its process between two calls")
        waiter: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._observe()
        self._waiting.append(waiter)
        try:
            while not waiter.done():
                self._observe()
                if not self._workers or self._waited_seconds >= self._start_seconds:
                    self._grow()
                await asyncio.wait({waiter}, timeout=max(POLL_SECONDS, self._start_seconds - self._waited_seconds))
        except BaseException:
            if not waiter.cancel() and waiter.exception() is None:
                self._release(waiter.result())
            raise
        return waiter.result()

    def _observe(self) -> None:
        """Add the time since the last observation to the waiting time, if a call has waited since then."""
        now = time.monotonic()
        if any(not waiter.done() for waiter in self._waiting):
            self._waited_seconds += now - self._observed
        self._observed = now

    def _release(self, worker: Worker) -> None:
        """Give a process to the call that waits longest."""
        self._observe()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(worker)
                return
        self._idle.append(worker)

    def _grow(self) -> None:
        """Start another process in the background, unless one starts already or no more are allowed."""
        if self._starting is not None:
            return
        self._waited_seconds = 0.0
        if self._closed or len(self._workers) >= self._max_workers:
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
        except WorkerLost as loss:
            log.warning("reward_worker_lost", reward=self._name, reason=str(loss))
            await asyncio.sleep(LOST_SECONDS)
        except (WorkerEnded, ProfileError) as error:
            self._ended.append(time.monotonic())
            if not self._workers:
                self._fail_all(f"reward {self._name} cannot be started again: {error}")
        finally:
            self._starting = None
        if self._waiting and not self._workers:
            self._grow()

    async def _new_worker(self) -> Worker:
        """Start a process and wait until it is ready. Raises ProfileError or WorkerEnded."""
        began = time.monotonic()
        try:
            worker = self._start_worker(self._function, on_output=self._output.add, further=bool(self._workers))
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
